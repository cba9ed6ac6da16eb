"""Writing files that `torch.load` reads, one tensor at a time.

`torch.save` wants every tensor at once. The file is the same: an uncompressed zip archive with the
pickled object in `data.pkl` and the bytes of each tensor in a record of its own, aligned so that
they can be mapped into memory.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from mindspeed_rlxf.weights.torch_file import STORAGES, contiguous_stride

ALIGNMENT = 64  # bytes, as torch's
PADDING_FIELD = 0x4246  # id of the extra field that moves a record to its place ("FB"), as torch's
ZIP64_FIELD = 20  # bytes that zipfile adds to the header of a record over 2 GiB
LOCAL_HEADER = 30
COPY_BYTES = 1 << 24

STORAGE_OF = {dtype: getattr(torch, name) for name, dtype in STORAGES.items()}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that is made when its turn comes, and dropped when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype
    elements: int


class _Pickler(pickle.Pickler):
    """Writes planned tensors as torch writes tensors, and notes them in that order."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)
        self.planned: list[PlannedTensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", STORAGE_OF[obj.dtype], obj.key, "cpu", obj.elements)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, PlannedTensor):
            return NotImplemented
        storage = _Storage(str(len(self.planned)), obj.dtype, prod(obj.shape))
        self.planned.append(obj)
        arguments: tuple[Any, ...] = (
            storage,
            0,
            obj.shape,
            contiguous_stride(obj.shape),
            False,
            OrderedDict(),
        )
        return torch._utils._rebuild_tensor_v2, arguments


def write_torch_file(path: Path, tree: Any, wrote: Callable[[int], None]) -> None:
    """Write `tree`, in which tensors are PlannedTensors, and have it on the disk on return.

    wrote: told the bytes of each tensor
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(tree)
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            _record(archive, "archive/data.pkl", pickled.getbuffer())
            _record(archive, "archive/byteorder", b"little")
            for key, planned in enumerate(pickler.planned):
                tensor = planned.make()
                assert tensor.shape == planned.shape and tensor.dtype == planned.dtype, (
                    f"planned {planned.shape} {planned.dtype}, got {tensor.shape} {tensor.dtype}"
                )
                _record(archive, f"archive/data/{key}", tensor_bytes(tensor))
                wrote(planned.num_bytes)
            _record(archive, "archive/version", b"3\n")
        file.flush()
        os.fsync(file.fileno())


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, not copied where it is contiguous."""
    array: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _record(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    info = zipfile.ZipInfo(name)
    info.file_size = len(data)
    assert archive.fp is not None, "the archive is open"
    large = info.file_size * 1.05 > zipfile.ZIP64_LIMIT
    before = archive.start_dir + LOCAL_HEADER + len(name) + ZIP64_FIELD * large
    gap = -(before + 4) % ALIGNMENT
    info.extra = struct.pack("<HH", PADDING_FIELD, gap) + bytes(gap)
    with archive.open(info, "w", force_zip64=large) as record:
        for piece in pieces(memoryview(data)):
            record.write(piece)


def pieces(data: memoryview) -> Iterator[memoryview]:
    """The bytes in parts, so that what copies them holds little."""
    for start in range(0, len(data), COPY_BYTES):
        yield data[start : start + COPY_BYTES]
