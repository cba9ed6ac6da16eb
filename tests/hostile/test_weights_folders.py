"""Valid weight folders with changed bytes, and indexes with impossible entries, are refused."""

import json
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
from mindspeed_rlxf.weights.chunks import HeldChunk, whole
from mindspeed_rlxf.weights.formats import find_weights
from mindspeed_rlxf.weights.role_state import file_of, write_chunks
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
    chunks = [HeldChunk("weight", name, whole(t.shape), t) for name, t in tensors.items()]
    write_chunks(file_of(root / "state", 0), chunks)
    return {name: root / name for name in ("hf", "legacy", "sharded", "state")}


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
def test_metadata_with_impossible_entries_is_refused(
    made: dict[str, Path], tmp_path: Path, name: str
) -> None:
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
