"""Hostile weights: no code of a file runs, and `convert` ends with one error line and exit code 2.

Ten programs for the pickle machine in each place of a checkpoint that is pickled.
"""

import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rlxf.cli.convert import main
from mindspeed_rlxf.weights.chunks import HeldChunk, whole
from mindspeed_rlxf.weights.formats import find_weights
from mindspeed_rlxf.weights.role_state import file_of, write_chunks
from tests.hostile.watched import outcome, read_all
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
    """A valid folder of every kind."""
    root = tmp_path_factory.mktemp("valid")
    tensors = make_folder(root / "hf", "llama")
    hf = str(root / "hf")
    assert main([hf, str(root / "legacy"), "--to", "mg", "--tp", "2"]) == 0
    assert main([hf, str(root / "sharded"), "--to", "mg", "--format", "torch_dist"]) == 0
    shutil.copytree(root / "hf", root / "bin")
    (root / "bin" / "model.safetensors").unlink()
    torch.save(tensors, root / "bin" / "pytorch_model.bin")
    (root / "state").mkdir()
    chunks = [HeldChunk("weight", name, whole(t.shape), t) for name, t in tensors.items()]
    write_chunks(file_of(root / "state", 0), chunks)
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_hostile_file_is_one_error_line_and_runs_nothing(
    made, tmp_path, monkeypatch, capsys, place, program
):
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


FILES = {
    "legacy": ["mp_rank_01/model_optim_rng.pt"],
    "sharded": [".metadata", "__0_0.distcp"],
    "state": ["state_00000.safetensors"],
    "hf": ["model.safetensors"],
}


def change(data: bytearray, rng: random.Random) -> None:
    """One to three mutations: of a byte, of a number, a part moved, repeated or taken out."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data))
        length = rng.randint(1, 40)
        part = bytes(data[at : at + length])
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, ord("("), ord("."), ord("R")))
            case 2:
                number = rng.choice((-1, 0, 1 << 31, (1 << 63) - 1, len(data)))
                data[at : at + 8] = struct.pack("<q", number)[: len(data) - at]
            case 3:
                data[at:at] = part
            case 4:
                del data[at : at + length]
            case 5:
                to = rng.randrange(len(data))
                data[to : to + length] = part


def mutate_folders(made: dict[str, Path], tmp_path: Path, seeds: range) -> int:
    """Returns how many were refused."""
    refused = 0
    for seed in seeds:
        rng = random.Random(seed)
        kind = rng.choice(list(FILES))
        folder = tmp_path / f"{kind}{seed}"
        shutil.copytree(made[kind], folder)
        file = find_weights(folder)[1] / rng.choice(FILES[kind])
        data = bytearray(file.read_bytes())
        # Mostly where the structure is: numbers of weights make up most of a file.
        head = bytearray(data[:2000]) if rng.random() < 0.5 else data
        change(head, rng)
        file.write_bytes(head if head is data else head + data[2000:])
        refused += bool(outcome(lambda folder=folder: read_all(folder)))
        shutil.rmtree(folder)
    return refused


def test_changed_folders_are_read_or_refused(made: dict[str, Path], tmp_path: Path) -> None:
    assert mutate_folders(made, tmp_path, range(80)) > 30


# Indexes that lie about their files ------------------------------------------------------------


def entry_of(metadata: Any) -> Any:
    return metadata.state_dict_metadata["decoder.final_layernorm.weight"]


def place_of(metadata: Any) -> Any:
    name = "decoder.final_layernorm.weight"
    return next(v for k, v in metadata.storage_data.items() if k.fqn == name)


def put(target: Callable[[Any], Any], name: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: object.__setattr__(target(metadata), name, value)


def chunk_of(metadata: Any) -> Any:
    return entry_of(metadata).chunks[0]


METADATA = {
    **{
        f"a file named {name!r}": put(place_of, "relative_path", name)
        for name in ("../x", "/etc/passwd", "gone", 3)
    },
    "an offset of 2**62": put(place_of, "offset", 1 << 62),
    "a negative offset": put(place_of, "offset", -1),
    "a length of 2**62": put(place_of, "length", 1 << 62),
    "a size of 2**49": put(entry_of, "size", torch.Size([1 << 49])),
    "no chunks": put(entry_of, "chunks", []),
    "chunks that are none": put(entry_of, "chunks", None),
    "a chunk elsewhere": put(chunk_of, "offsets", torch.Size([5])),
    "a larger chunk": put(chunk_of, "sizes", torch.Size([17])),
    "another dtype": put(lambda m: entry_of(m).properties, "dtype", torch.float64),
    "no places": put(lambda m: m, "storage_data", {}),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_with_impossible_entries_is_refused(made, tmp_path, name):
    folder = find_weights(shutil.copytree(made["sharded"], tmp_path / "x"))[1]
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    METADATA[name](metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert outcome(lambda: read_all(folder))


@pytest.mark.parametrize(
    "header", [[], {"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}]
)
def test_a_header_that_lists_no_chunks_is_refused(tmp_path: Path, header: Any) -> None:
    data = json.dumps(header).encode()
    file_of(tmp_path, 0).write_bytes(struct.pack("<Q", len(data)) + data + bytes(4))
    assert "is damaged or truncated" in outcome(lambda: read_all(tmp_path))


def test_ranks_of_absurd_numbers_are_refused(made: dict[str, Path], tmp_path: Path) -> None:
    folder = find_weights(shutil.copytree(made["legacy"], tmp_path / "x"))[1]
    (folder / "mp_rank_01").rename(folder / "mp_rank_99999999999")
    assert "lacks ranks: tp 1 " in outcome(lambda: read_all(folder))
