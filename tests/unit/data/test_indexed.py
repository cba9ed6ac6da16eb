"""Our files are those of megatron-core, byte by byte, and broken ones are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from mindspeed_rlxf.data.indexed_prompts import BrokenIndex, IndexedReader, IndexedWriter

ROWS = [[5, 6, 7], [1], [2, 3]]


def write(path: Path, dtype: type[np.generic] = np.int32) -> None:
    writer = IndexedWriter(path, dtype)
    for row in ROWS:
        writer.add(np.array(row, dtype).tobytes(), [len(row)])
    writer.close()


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_files_are_those_that_megatron_core_writes(dtype: type, tmp_path: Path) -> None:
    write(tmp_path / "a.b", dtype)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for row in ROWS:
        builder.add_document(torch.tensor(row), [len(row)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for ending in (".bin", ".idx"):
        ours = (tmp_path / f"a.b{ending}").read_bytes()
        assert ours == (tmp_path / f"theirs{ending}").read_bytes()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("a.idx", lambda raw: b""),
        ("a.idx", lambda raw: b"X" + raw[1:]),
        ("a.idx", lambda raw: raw[:17] + b"\x63" + raw[18:]),  # dtype code 99
        ("a.idx", lambda raw: raw[:40]),
        ("a.bin", lambda raw: raw[:-1]),
        ("a.bin", lambda raw: b""),
    ],
)
def test_a_broken_file_is_refused(file: str, change, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write(tmp_path / "a")
    (tmp_path / file).write_bytes(change((tmp_path / file).read_bytes()))
    with pytest.raises(BrokenIndex):
        IndexedReader(tmp_path / "a")
