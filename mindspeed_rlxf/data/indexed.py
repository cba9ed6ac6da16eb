"""Read Megatron's indexed data sets (items in `PATH.bin`, offsets in `PATH.idx`), and write them.

The `.idx` file, little endian: MAGIC, version (uint64, 1), code of the dtype (uint8), number of
sequences n and of document bounds n+1 (uint64), lengths in items [n] int32, offsets in bytes [n]
int64, document bounds [n+1] int64.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, Any] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
"""Code in the file -> dtype."""

AnyArray = np.ndarray[tuple[int, ...], np.dtype[Any]]


class BrokenIndex(ValueError):
    """The files are not a complete indexed data set."""


class IndexedWriter:
    """Appends sequences to `{path}.bin` by Megatron's builder; `close` writes `{path}.idx`."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        # Here, because importing Megatron takes seconds, for which no reader should wait.
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self._path, self._dtype = path, dtype
        self._builder = IndexedDatasetBuilder(f"{path}.bin", dtype=dtype)

    def add(self, items: bytes, lengths: Sequence[int]) -> None:
        """Append sequences, each a document of its own.

        items:   bytes of all sequences, concatenated, in the writer's dtype
        lengths: items of each sequence
        """
        import torch

        numbers = torch.from_numpy(np.frombuffer(items, self._dtype).copy())
        for sequence in torch.split(numbers, list(lengths)):
            self._builder.add_item(sequence)
            self._builder.end_document()

    def add_set(self, path: Path) -> None:
        """Append every sequence of another data set of the same dtype, in order."""
        self._builder.add_index(str(path))

    def close(self) -> None:
        self._builder.finalize(f"{self._path}.idx")


class IndexedReader:
    """The sequences of an indexed data set, mapped into memory.

    Raises BrokenIndex when a file is incomplete or malformed, OSError when it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        index = Path(f"{path}.idx").read_bytes()
        magic, version, code, size, bounds = HEADER.unpack_from(index.ljust(HEADER.size))
        is_known = magic == MAGIC and version == 1 and code in DTYPES
        if not is_known or len(index) < HEADER.size + 12 * size + 8 * bounds:
            raise BrokenIndex(f"{path}.idx is no complete index, it starts with {index[:18]!r}")
        self.dtype: np.dtype[Any] = np.dtype(DTYPES[code])
        self._lengths = np.frombuffer(index, np.int32, size, HEADER.size)
        self._offsets = np.frombuffer(index, np.int64, size, HEADER.size + 4 * size)
        content = Path(f"{path}.bin")
        num_bytes = content.stat().st_size
        ends = self._offsets + self._lengths.astype(np.int64) * self.dtype.itemsize
        least = min(self._offsets.min(initial=0), self._lengths.min(initial=0))
        most = max(self._offsets.max(initial=0), ends.max(initial=0))
        if least < 0 or most > num_bytes:
            raise BrokenIndex(f"{content} has {num_bytes} bytes, the index needs {most}")
        self._bytes = np.memmap(content, np.uint8, "r") if num_bytes else np.zeros(0, np.uint8)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, row: int) -> AnyArray:
        """Return one sequence as a read-only copy: [items] of the data set's dtype.

        row: from 0; negative ones count from the end
        """
        start = self._offsets[row]
        stop = start + int(self._lengths[row]) * self.dtype.itemsize
        return np.frombuffer(self._bytes[start:stop].tobytes(), self.dtype)
