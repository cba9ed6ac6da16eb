"""Write indexed data sets in Megatron's format without the code of the package."""

import struct
from pathlib import Path

import numpy as np


def write_pair(path: Path, rows: list[list[int]], code: int = 4) -> None:
    """Write PATH.idx (header, lengths, offsets, documents) and PATH.bin.

    code: Megatron's code of the dtype, 4 = int32, 1 = uint8
    """
    dtype = {4: np.int32, 1: np.uint8}[code]
    lengths = np.array([len(row) for row in rows], np.int32)
    offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(rows), len(rows) + 1)
    documents = np.arange(len(rows) + 1, dtype=np.int64)
    parts = [head, lengths.tobytes(), offsets.tobytes(), documents.tobytes()]
    path.with_name(f"{path.name}.idx").write_bytes(b"".join(parts))
    content = b"".join(np.array(row, dtype).tobytes() for row in rows)
    path.with_name(f"{path.name}.bin").write_bytes(content)
