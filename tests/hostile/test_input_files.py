"""FIFOs, sockets, devices, folders and absurd numbers in place of files that a command opens."""

from __future__ import annotations

import json
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_rlxf.checkpoint.store import RunStore
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.indexed_prompts import HEADER, MAGIC, BrokenIndex, IndexedReader
from mindspeed_rlxf.data.prompts import load_prompts
from mindspeed_rlxf.data.sidecar import read_sidecar
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from mindspeed_rlxf.weights.formats import find_weights
from mindspeed_rlxf.weights.hf_folder import HfFolder
from tests.unit.data.byte_tokenizer import byte_tokenizer, write_tokenizer

SECONDS = 30


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A case that waits is interrupted, and fails."""

    def late(*_: object) -> None:
        raise AssertionError(f"not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def prompts(file: Path) -> Any:
    return load_prompts(str(file), byte_tokenizer(), DataConfig(train_files=["x"]), 100)


def tokenizer(file: Path) -> Any:
    write_tokenizer(file.parent / "good")
    for made in (file.parent / "good").iterdir():
        if made.name != file.name:
            made.rename(file.parent / made.name)
    return load_tokenizer(str(file.parent))


def indexed(file: Path) -> Any:
    """Read an indexed data set, one file of which is there."""
    header = HEADER.pack(MAGIC, 1, 4, 0, 1) + bytes(8)
    other, content = (".bin", b"") if file.suffix == ".idx" else (".idx", header)
    file.with_suffix(other).write_bytes(content)
    return IndexedReader(file.with_suffix(""))


@pytest.mark.parametrize(
    "text", ["9" * 400, "1" * 5000, "\x1b[2J", "../..", "-1", "¹", "x" * 4000], ids=range(7)
)
def test_a_hostile_pointer_is_the_users_mistake(text: str, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(ValueError) as error:
        find_weights(tmp_path)
    assert "copy it again" in str(error.value) and len(str(error.value)) < 1000
    (tmp_path / "exported_iteration.txt").write_text(text)
    assert RunStore(tmp_path).exported() in (None, -1, int("9" * 400))


ABSURD: list[Any] = [10**12, 10**400, -1, "2", [2], {"a": 2}, 1e12, float("nan"), float("inf"), 0.5]


def index(folder: Path, size: int, lengths: list[int], offsets: list[int], content: int) -> Path:
    header = HEADER.pack(MAGIC, 1, 4, size, len(lengths) + 1)
    parts = (np.asarray(lengths, "<i4"), np.asarray(offsets, "<i8"), np.zeros(len(lengths) + 1))
    (folder / "a.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    (folder / "a.bin").write_bytes(bytes(content))
    return folder / "a"


@pytest.mark.parametrize(
    ("size", "lengths", "offsets"),
    [
        (2**60, [1], [0]),
        (2**64 - 1, [], []),
        (1, [2**31 - 1], [0]),
        (1, [-1], [0]),
        (1, [1], [-8]),
        (1, [1], [2**63 - 1]),  # place + length is negative in 64 bits
        (1, [1], [2**63 - 4]),
    ],
)
def test_an_absurd_index_is_refused(
    size: int, lengths: list[int], offsets: list[int], tmp_path: Path
) -> None:
    with pytest.raises(BrokenIndex):
        IndexedReader(index(tmp_path, size, lengths, offsets, 400))


@pytest.mark.parametrize("file", ["../../etc/passwd", "a/b", "", "x" * 200, "\0"])
def test_a_column_of_a_sidecar_must_be_a_file_name_without_folders(
    file: str, tmp_path: Path
) -> None:
    column = {"name": "input_ids", "file": file, "dtype": "int32", "encoding": "token_ids"}
    content = {
        "format_version": 1, "handler": "h", "template": "t", "stop_token_ids": [], "counts": {},
        "columns": [column], "tokenizer": {"path": "p", "sha256": "s"},
    }  # fmt: skip
    (tmp_path / "a_packed_meta.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"columns\.0\.file is not valid"):
        read_sidecar(tmp_path / "a")


def test_a_header_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(ValueError, match="damaged or truncated"):
        HfFolder(tmp_path)
