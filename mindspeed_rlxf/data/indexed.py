"""Read and write Megatron's indexed data sets: items in `PATH.bin`, offsets in `PATH.idx`.

The `.idx` file, little endian: MAGIC, version (uint64, 1), code of the dtype (uint8), number of
sequences n and of document bounds n+1 (uint64), lengths in items [n] int32, offsets in bytes [n]
int64, document bounds [n+1] int64. megatron-core reads and writes the same files; its own code is
not used because importing it takes longer than to preprocess a small data set.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_rlxf.files.plain import open_plain, read_plain
from mindspeed_rlxf.files.safe import new_file

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

MAX_INDEX = 512 * 2**20  # bytes: 26 million sequences

AnyArray = np.ndarray[tuple[int, ...], np.dtype[Any]]


class BrokenIndex(ValueError):
    """The files are not a complete indexed data set."""


class IndexedWriter:
    """Appends sequences to a new `{path}.bin`; `close` writes `{path}.idx`. Raises OSError."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        self._path, self._dtype = path, np.dtype(dtype)
        self._bin = new_file(Path(f"{path}.bin"))
        self._lengths = array("i")

    def add(self, items: bytes | memoryview, lengths: Sequence[int]) -> None:
        """Append sequences to the .bin file.

        items:   bytes of all sequences, concatenated, in the writer's dtype
        lengths: items of each sequence; must add up to `items`, or AssertionError is raised
        """
        assert len(items) == sum(lengths) * self._dtype.itemsize, "lengths are those of the items"
        self._bin.write(items)
        self._lengths.extend(lengths)

    def add_all(self, reader: IndexedReader) -> None:
        """Append every sequence of another data set, in order.

        The dtypes must be the same; this is not checked.
        """
        for row in range(len(reader)):
            sequence = reader[row]
            self.add(sequence.tobytes(), [len(sequence)])

    def close(self) -> None:
        """Write the .idx file, flush it and the .bin file to the disk (fsync), and close both."""
        lengths = np.asarray(self._lengths, dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
        (code,) = (code for code, dtype in DTYPES.items() if dtype == self._dtype)
        size = len(lengths)
        with new_file(Path(f"{self._path}.idx")) as stream:
            stream.write(HEADER.pack(MAGIC, 1, code, size, size + 1))
            stream.write(lengths.tobytes())
            stream.write((ends - lengths * self._dtype.itemsize).tobytes())
            stream.write(np.arange(size + 1, dtype=np.int64).tobytes())
            _flush(stream)
        _flush(self._bin)
        self._bin.close()


class IndexedReader:
    """The sequences of an indexed data set, mapped into memory.

    Raises BrokenIndex when a file is incomplete or malformed, OSError when it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        index = read_plain(Path(f"{path}.idx"), MAX_INDEX)
        if len(index) < HEADER.size:
            raise BrokenIndex(f"{path}.idx has {len(index)} bytes")
        magic, version, code, size, bounds = HEADER.unpack_from(index)
        if magic != MAGIC or version != 1 or code not in DTYPES:
            raise BrokenIndex(f"{path}.idx starts with {index[:18]!r}")
        if len(index) < HEADER.size + 12 * size + 8 * bounds:
            raise BrokenIndex(f"{path}.idx ends before its {size} sequences do")
        self.dtype: np.dtype[Any] = np.dtype(DTYPES[code])
        self._lengths = np.frombuffer(index, np.int32, size, HEADER.size)
        self._offsets = np.frombuffer(index, np.int64, size, HEADER.size + 4 * size)
        content = Path(f"{path}.bin")
        with open_plain(content) as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
        self._check_offsets(content, num_bytes)
        self._bytes = np.memmap(content, np.uint8, "r") if num_bytes else np.zeros(0, np.uint8)

    def _check_offsets(self, content: Path, num_bytes: int) -> None:
        """Raise BrokenIndex for negative lengths or offsets, or an end after that of the .bin file.

        Also if the sequences together are larger than the file, as they then overlap.
        content: path of the .bin file, num_bytes: its size
        """
        if not len(self):
            return
        if self._lengths.min() < 0 or self._offsets.min() < 0:
            raise BrokenIndex(f"the index of {content} has a negative length or offset")
        sizes = self._lengths.astype(np.int64) * self.dtype.itemsize
        ends = np.minimum(self._offsets, num_bytes) + sizes  # limited, so that no sum overflows
        needed = max(int(self._offsets.max()), int(ends.max()))
        if needed > num_bytes:
            raise BrokenIndex(f"{content} has {num_bytes} bytes, the index needs {needed}")
        if int(sizes.sum()) > num_bytes:
            raise BrokenIndex(f"the sequences of {content} overlap")

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, row: int) -> AnyArray:
        """Return one sequence as a read-only copy: [items] of the data set's dtype.

        row: from 0; negative ones count from the end
        """
        start = self._offsets[row]
        stop = start + int(self._lengths[row]) * self.dtype.itemsize
        return np.frombuffer(self._bytes[start:stop].tobytes(), self.dtype)


def _flush(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())
