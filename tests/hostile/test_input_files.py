"""Pointers, indices and sidecars with absurd numbers and names."""

import json
from pathlib import Path

import numpy as np
import pytest

from mindspeed_rlxf.checkpoint.store import RunStore
from mindspeed_rlxf.data.indexed_prompts import HEADER, MAGIC, BrokenIndex, IndexedReader
from mindspeed_rlxf.data.sidecar import read_sidecar
from mindspeed_rlxf.weights.formats import find_weights


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
def test_an_absurd_index_is_refused(size, lengths, offsets, tmp_path):
    with pytest.raises(BrokenIndex):
        IndexedReader(index(tmp_path, size, lengths, offsets, 400))


@pytest.mark.parametrize("file", ["../../etc/passwd", "a/b", "", "x" * 200, "\0"])
def test_a_column_of_a_sidecar_must_be_a_file_name_without_folders(file, tmp_path):
    column = {"name": "input_ids", "file": file, "dtype": "int32", "encoding": "token_ids"}
    content = {
        "format_version": 1, "handler": "h", "template": "t", "stop_token_ids": [], "counts": {},
        "columns": [column], "tokenizer": {"path": "p", "sha256": "s"},
    }  # fmt: skip
    (tmp_path / "a_packed_meta.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"columns\.0\.file is not valid"):
        read_sidecar(tmp_path / "a")
