"""Safetensors files: written tensor by tensor, read box by box.

The library wants all tensors of a file at once. It maps the files that it reads, which ends the
process where a file is cut short meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from mindspeed_rlxf.files.plain import open_plain, parse_json
from mindspeed_rlxf.files.safe import new_file
from mindspeed_rlxf.weights.boxes import Box, Shape, StoredBox
from mindspeed_rlxf.weights.planned import PlannedTensor, Wrote

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
OF_NAME = {name: dtype for dtype, name in DTYPES.items()}
ALIGNMENT = 8  # of the data, bytes
MAX_HEADER_BYTES = 32 << 20  # 300,000 tensors
METADATA = "__metadata__"
HEADER_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What `SafetensorsFile.tensors` raises where a header is damaged or does not fit its file."""


def write_safetensors(path: Path, tensors: dict[str, PlannedTensor], wrote: Wrote) -> None:
    """Write a safetensors file and fsync it; a file of that name is replaced.

    Tensors are in the order of `tensors`. They are made and written one at a time; `wrote` is
    called after each with its number of bytes.
    """
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for name, planned in tensors.items():
        start, end = end, end + planned.num_bytes
        header[name] = {
            "dtype": DTYPES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with new_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for planned in tensors.values():
            file.writelines(planned.parts())
            wrote(planned.num_bytes)
        file.flush()
        os.fsync(file.fileno())


def sort_by_width(tensors: dict[str, PlannedTensor]) -> dict[str, PlannedTensor]:
    """Sort tensors by bytes per element, widest dtype first, so that all are aligned."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


class SafetensorsFile:
    """A safetensors file, opened at the first read, from which boxes of tensors are read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def stream(self) -> IO[bytes]:
        return open_plain(self.path)

    def tensors(self) -> Iterator[tuple[str, torch.dtype, Shape, int]]:
        """Read the header; yield (name, dtype, shape, offset of the first byte) of each tensor.

        In the order of the header; offsets count from the start of the file.
        Raises HEADER_ERRORS where the header is damaged or does not fit the file.
        """
        length = int.from_bytes(self._read_bytes(0, 8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes")
        header = parse_json(self._read_bytes(8, length))
        header.pop(METADATA, None)
        data, end = 8 + length, os.fstat(self.stream.fileno()).st_size
        for name, about in header.items():
            shape, dtype = tuple(about["shape"]), OF_NAME[about["dtype"]]
            first, last = about["data_offsets"]
            if {type(n) for n in (first, last, *shape)} != {int}:
                raise ValueError(f"{name[:100]!r} has numbers of another kind")
            fits = last - first == prod(shape) * dtype.itemsize and data + last <= end
            if not fits or not name.isprintable() or min(first, *shape) < 0:
                raise ValueError(f"{name[:100]!r} does not fit the file")
            yield name, dtype, shape, data + first

    def stored_box(self, first_byte: int, dtype: torch.dtype, box: Box) -> StoredBox:
        """Return a StoredBox that reads the tensor at `first_byte` as `box` of a larger tensor."""
        return StoredBox(box, partial(self._read_box, first_byte, dtype, box))

    def _read_box(self, first_byte: int, dtype: torch.dtype, stored: Box, wanted: Box) -> Tensor:
        """Read and return the box `wanted`, which must be inside the box `stored`.

        Whole rows are read at once, others row by row. first_byte: offset of the stored box in the
        file. Raises ValueError for a truncated file, AssertionError for more than two axes.
        """
        assert 1 <= len(stored.shape) <= 2, f"a parameter has one axis or two, not {stored.shape}"
        result = torch.empty(wanted.shape, dtype=dtype)
        if not result.numel():
            return result
        target = memoryview(result.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        whole_rows = wanted.shape[1:] == stored.shape[1:]
        done, row_size = 0, prod(stored.shape[1:])
        for rows in [wanted] if whole_rows else wanted.split(1):
            first, *rest = rows.relative_to(stored).starts
            number, end = first * row_size + sum(rest), done + rows.numel * dtype.itemsize
            self._read_into(first_byte + number * dtype.itemsize, target[done:end])
            done = end
        return result

    def _read_bytes(self, offset: int, length: int) -> bytes:
        content = bytearray(length)
        self._read_into(offset, memoryview(content))
        return bytes(content)

    def _read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes at `offset`. Raises ValueError if the file ends first."""
        done = 0
        while done < len(target):
            count = os.preadv(self.stream.fileno(), [target[done:]], offset + done)
            if count == 0:
                raise ValueError(f"{self.path} is truncated; copy it again")
            done += count

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        if stream := vars(self).pop("stream", None):
            stream.close()
