"""Hostile weights: no code of a file runs, and `convert` ends with one error line and exit code 2.

Ten programs for the pickle machine in each place of a checkpoint that is pickled.
"""

import io
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rlxf.cli.convert import main
from mindspeed_rlxf.weights.formats import find_weights
from tests.unit.weights.folders_of import make_folder

MARK = "mark"  # folder that a program makes in the working directory where it is run


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def by_line(module: str, name: str, *arguments: str) -> bytes:
    """A call as protocol 2 writes it, which torch.save uses."""
    given = b"".join(map(text, arguments))
    return b"\x80\x02" + f"c{module}\n{name}\n".encode() + b"(" + given + b"tR."


def by_stack(module: str, name: str, *arguments: str) -> bytes:
    """A call as protocol 4 writes it, with the name on the stack."""
    given = b"".join(map(text, arguments))
    return b"\x80\x04" + text(module) + text(name) + b"\x93(" + given + b"tR."


MKDIR = f"__import__('os').mkdir('{MARK}')"
PROGRAMS = {
    "a function of the system": by_line("os", "mkdir", MARK),
    "a function of posix": by_stack("posix", "mkdir", MARK),
    "a program of the shell": by_line("subprocess", "getoutput", f"mkdir {MARK}"),
    "eval": by_line("builtins", "eval", MKDIR),
    "eval by its old name": by_line("__builtin__", "eval", MKDIR),
    "an attribute of a module": by_stack("torch", "os.mkdir", MARK),
    "a pickle in a pickle": b"\x80\x02c_pickle\nloads\nc_codecs\nencode\n("
    + text(by_line("os", "mkdir", MARK).decode("latin1"))
    + text("latin1")
    + b"tR\x85R.",
    "an object of an older opcode": f"(S'{MARK}'\nios\nmkdir\n.".encode(),
    "a function as an attribute": b"\x80\x02cargparse\nNamespace\n)R}"
    + text("__setstate__")
    + b"cos\nmkdir\nsb"
    + text(MARK)
    + b"b.",
    "a new method of a class": b"\x80\x02ccollections\nOrderedDict\nN}"
    + text("__init__")
    + b"cos\nmkdir\ns\x86b.",
}


def archive(program: bytes) -> bytes:
    """A file of torch.save whose pickle is the program."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("archive/data.pkl", program)
        file.writestr("archive/version", b"3\n")
    return stream.getvalue()


def older(program: bytes) -> bytes:
    """A file as torch saved it before 1.6: magic number, version, system, then the pickle."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    parts = (torch.serialization.MAGIC_NUMBER, 1001, system)
    return b"".join(pickle.dumps(part, 2) for part in parts) + program


def replace_shard(folder: Path, program: bytes) -> None:
    """Put the program in the place of the first tensor of the metadata."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    data = archive(program)
    (folder / "__9_0.distcp").write_bytes(data)
    for index, place in metadata.storage_data.items():
        if index.fqn == "decoder.final_layernorm.weight":
            place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(data)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


PLACES: dict[str, tuple[str, Callable[[Path, bytes], Any]]] = {
    "pytorch_model.bin": ("bin", lambda f, p: (f / "pytorch_model.bin").write_bytes(archive(p))),
    "an older .pt": (
        "legacy",
        lambda f, p: (f / "mp_rank_00/model_optim_rng.pt").write_bytes(older(p)),
    ),
    ".metadata": ("sharded", lambda f, p: (f / ".metadata").write_bytes(p)),
    "a shard": ("sharded", replace_shard),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A valid folder of every pickled kind."""
    root = tmp_path_factory.mktemp("valid")
    tensors = make_folder(root / "hf", "llama")
    hf = str(root / "hf")
    assert main([hf, str(root / "legacy"), "--to", "mg"]) == 0
    assert main([hf, str(root / "sharded"), "--to", "mg", "--format", "torch_dist"]) == 0
    shutil.copytree(root / "hf", root / "bin")
    (root / "bin" / "model.safetensors").unlink()
    torch.save(tensors, root / "bin" / "pytorch_model.bin")
    return {name: root / name for name in ("bin", "legacy", "sharded")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_hostile_file_is_one_error_line_and_runs_nothing(
    made: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    program: str,
) -> None:
    kind, put = PLACES[place]
    source = shutil.copytree(made[kind], tmp_path / "source")
    put(find_weights(source)[1], PROGRAMS[program])
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    capsys.readouterr()
    assert main([str(source), str(tmp_path / "back"), "--to", "hf"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("error: ")
    assert all(line.endswith(" s") for line in said[:-1]), "lines of progress"
    assert os.listdir(tmp_path / "work") == [] and not (tmp_path / "back").exists()
