"""Valid weight folders with changed bytes, and indexes with impossible entries, are refused."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rlxf.cli.convert import main
from mindspeed_rlxf.weights.boxes import HeldBox, whole
from mindspeed_rlxf.weights.formats import find_weights
from mindspeed_rlxf.weights.role_state import file_of, write_boxes
from tests.hostile.test_weights import PROGRAMS
from tests.hostile.watched import outcome, read_all
from tests.unit.weights.folders_of import make_folder

# Folders ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A valid folder of every kind."""
    root = tmp_path_factory.mktemp("valid")
    tensors = make_folder(root / "hf", "llama")
    hf = str(root / "hf")
    assert main([hf, str(root / "legacy"), "--to", "mg", "--tp", "2"]) == 0
    assert main([hf, str(root / "sharded"), "--to", "mg", "--format", "torch_dist"]) == 0
    (root / "state").mkdir()
    boxes = [HeldBox("weight", name, whole(t.shape), t) for name, t in tensors.items()]
    write_boxes(file_of(root / "state", 0), boxes)
    return {name: root / name for name in ("hf", "legacy", "sharded", "state")}


@pytest.mark.parametrize("kind", ["hf", "legacy", "sharded", "state"])
def test_the_valid_folders_are_read(made: dict[str, Path], kind: str) -> None:
    assert outcome(lambda: read_all(made[kind])) == ""


FILES = {
    "legacy": ["mp_rank_01/model_optim_rng.pt"],
    "sharded": [".metadata", "__0_0.distcp", "common.pt", "__extra_0.distcp"],
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


@pytest.mark.long
def test_2000_changed_folders_are_read_or_refused(made: dict[str, Path], tmp_path: Path) -> None:
    assert mutate_folders(made, tmp_path, range(1000, 3000)) > 800


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
        for name in ("../x", "/etc/passwd", "a/../../x", "", "a\\b", "gone", ".", "a\0b", 3, None)
    },
    "an offset of 2**62": put(place_of, "offset", 1 << 62),
    "a negative offset": put(place_of, "offset", -1),
    "an offset that is a bool": put(place_of, "offset", True),
    "a length of 2**62": put(place_of, "length", 1 << 62),
    "a negative length": put(place_of, "length", -5),
    "a length of 0": put(place_of, "length", 0),
    "a length that is a float": put(place_of, "length", 1.5),
    "all files over each other": lambda m: [
        (setattr(v, "offset", 0), setattr(v, "length", 9000)) for v in m.storage_data.values()
    ],
    "compressed": put(place_of, "transform_descriptors", ["zstd"]),
    "a size of 2**49": put(entry_of, "size", torch.Size([1 << 49])),
    "a size that is a list": put(entry_of, "size", [16]),
    "a size of no axis": put(entry_of, "size", torch.Size([])),
    "a size of 40 axes": put(entry_of, "size", torch.Size([1] * 40)),
    "no chunks": put(entry_of, "chunks", []),
    "chunks that are none": put(entry_of, "chunks", None),
    "a chunk twice": lambda m: entry_of(m).chunks.append(chunk_of(m)),
    "a chunk elsewhere": put(chunk_of, "offsets", torch.Size([5])),
    "a larger chunk": put(chunk_of, "sizes", torch.Size([17])),
    "a smaller chunk": put(chunk_of, "sizes", torch.Size([15])),
    "a chunk of two axes": put(chunk_of, "sizes", torch.Size([4, 4])),
    "no properties": put(entry_of, "properties", None),
    "another dtype": put(lambda m: entry_of(m).properties, "dtype", torch.float64),
    "a tensor under a number": lambda m: m.state_dict_metadata.update({3: entry_of(m)}),
    "a name of control characters": lambda m: m.state_dict_metadata.update({"\x1b[2J": None}),
    "no places": put(lambda m: m, "storage_data", {}),
    "places that are none": put(lambda m: m, "storage_data", None),
    "names that are none": put(lambda m: m, "state_dict_metadata", [1]),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_with_impossible_entries_is_refused(
    made: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folder = find_weights(shutil.copytree(made["sharded"], tmp_path / "x"))[1]
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    METADATA[name](metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert outcome(lambda: read_all(folder))


KEY = "weight/model.norm.weight@0"
HEADERS: dict[str, Any] = {
    "no dict": [],
    "deep": "[" * 100_000,
    "deep dicts": '{"a":' * 100_000,
    "a number of 5000 digits": '{"a": ' + "9" * 5000 + "}",
    "no fields": {KEY: {}},
    "no name": {"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
    **{
        f"{field} of {value}": {
            KEY: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], field: value}
        }
        for field, value in (
            *(("shape", [-1]), ("shape", [True]), ("shape", [1.0]), ("shape", ["1"])),
            *(("shape", [2]), ("shape", [1 << 62]), ("shape", []), ("shape", None), ("shape", {})),
            *(("shape", [1, 1, 1]), ("dtype", "O"), ("dtype", None), ("dtype", [])),
            *(("data_offsets", [0, 8]), ("data_offsets", [-4, 0]), ("data_offsets", [0])),
            *(("data_offsets", [4, 0]), ("data_offsets", [1 << 62, (1 << 62) + 4])),
            *(("data_offsets", "04"), ("data_offsets", [0.0, 4.0]), ("data_offsets", None)),
        )
    },
    **{
        f"a place of {corner[:9]!r}": {
            f"weight/n@{corner}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        }
        for corner in ("", "-1", "1,1", "x", "9" * 5000, "1e9", " 1", "\u0661,")
    },
    "a name of control characters": {
        "weight/\x1b[2J@0": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    },
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_with_impossible_entries_is_refused(tmp_path: Path, name: str) -> None:
    header = HEADERS[name]
    data = (header if isinstance(header, str) else json.dumps(header)).encode()
    file_of(tmp_path, 0).write_bytes(struct.pack("<Q", len(data)) + data + bytes(4))
    assert "is damaged or truncated" in outcome(lambda: read_all(tmp_path))


@pytest.mark.parametrize("length", [0, 1 << 25, 1 << 40, (1 << 64) - 1])
def test_a_header_of_a_wrong_length_is_refused(tmp_path: Path, length: int) -> None:
    file_of(tmp_path, 0).write_bytes(struct.pack("<Q", length) + b"{}")
    assert "is damaged or truncated" in outcome(lambda: read_all(tmp_path))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ((format_, file), kind)
        for format_, files in FILES.items()
        for file in files
        for kind in ("pipe", "folder", "link")
        if kind != "link" or format_ != "hf"
    ],
)
def test_a_weights_entry_that_is_no_file_is_refused(
    made: dict[str, Path], tmp_path: Path, name: tuple[str, str], kind: str
) -> None:
    """A pipe would be waited for, a link leads to another file of this host."""
    folder = find_weights(shutil.copytree(made[name[0]], tmp_path / "x"))[1]
    file = folder / name[1]
    file.rename(tmp_path / "away")
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(tmp_path / "away")
    assert outcome(lambda: read_all(folder))


def test_ranks_of_absurd_numbers_are_refused(made: dict[str, Path], tmp_path: Path) -> None:
    folder = find_weights(shutil.copytree(made["legacy"], tmp_path / "x"))[1]
    (folder / "mp_rank_01").rename(folder / "mp_rank_99999999999")
    assert "lacks ranks: tp 1 " in outcome(lambda: read_all(folder))


def test_the_command_ends_in_one_line(made: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    for number, data in enumerate((PROGRAMS["deep tuples"], PROGRAMS["os.system reduced"], b"")):
        folder = shutil.copytree(made["sharded"], tmp_path / f"x{number}")
        (find_weights(folder)[1] / ".metadata").write_bytes(data)
        capsys.readouterr()
        assert main([str(folder), str(tmp_path / "back"), "--to", "hf"]) == 2
        said = capsys.readouterr().err.strip()
        assert said.startswith("error: ") and len(said.splitlines()) == 1
        assert not (tmp_path / "back").exists()
