"""Write files of `torch.save` one tensor at a time.

`torch.save` wants every tensor at once. The file that is written here is the same: an uncompressed
zip archive with the pickled object in `data.pkl` and the bytes of each tensor in a record of its
own, aligned so that they can be mapped into memory.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch

from mindspeed_rlxf.weights.planned import PlannedTensor, Wrote

PICKLE = "data.pkl"
PADDING_FIELD = 0x4246  # id of the extra field that aligns a record, as torch writes it
ALIGNMENT = 64  # bytes, as torch's
ZIP64_EXTRA = 20  # bytes that zipfile adds to the header of a record over 2 GiB
LOCAL_HEADER = 30  # bytes before the name of a record


STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
STORAGE_OF = {dtype: getattr(torch, name) for name, dtype in STORAGES.items()}


@dataclass(frozen=True)
class _PlannedStorage:
    key: str
    dtype: torch.dtype
    elements: int


class _Pickler(pickle.Pickler):
    """Pickles planned tensors as torch does tensors, and lists them in `planned`, in order."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)
        self.planned: list[PlannedTensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _PlannedStorage):
            return ("storage", STORAGE_OF[obj.dtype], obj.key, "cpu", obj.elements)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Pickle a PlannedTensor as torch does a tensor with its own storage; add it to `planned`.

        Returns NotImplemented for other objects, which are then pickled as usual.
        """
        if not isinstance(obj, PlannedTensor):
            return NotImplemented
        storage = _PlannedStorage(str(len(self.planned)), obj.dtype, prod(obj.shape))
        self.planned.append(obj)
        stride = torch.empty(obj.shape, device="meta").stride()
        hooks: OrderedDict[Any, Any] = OrderedDict()
        arguments = (storage, 0, obj.shape, stride, False, hooks)
        return torch._utils._rebuild_tensor_v2, arguments


def write_torch_file(path: Path, tree: Any, wrote: Wrote) -> None:
    """Write `tree` to a file in the format of `torch.save`, and fsync it.

    Its PlannedTensors become tensors, made one at a time; `wrote` is called after each with its
    number of bytes.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(tree)
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            _write_record(archive, PICKLE, pickled.tell(), [pickled.getbuffer()])
            _write_record(archive, "byteorder", 6, [b"little"])
            for key, planned in enumerate(pickler.planned):
                _write_record(archive, f"data/{key}", planned.num_bytes, planned.parts())
                wrote(planned.num_bytes)
            _write_record(archive, "version", 2, [b"3\n"])
        file.flush()
        os.fsync(file.fileno())


def _write_record(
    archive: zipfile.ZipFile, name: str, size: int, parts: Iterable[bytes | memoryview]
) -> None:
    """Write `parts`, `size` bytes in all, as uncompressed record `archive/NAME` of the archive.

    An extra field pads the header, so that the data begins at a multiple of ALIGNMENT in the file.
    """
    info = zipfile.ZipInfo(f"archive/{name}")
    info.file_size = size
    assert archive.fp is not None, "the archive is open"
    large = size * 1.05 > zipfile.ZIP64_LIMIT
    before = archive.start_dir + LOCAL_HEADER + len(info.filename) + ZIP64_EXTRA * large
    gap = -(before + 4) % ALIGNMENT
    info.extra = struct.pack("<HH", PADDING_FIELD, gap) + bytes(gap)
    with archive.open(info, "w", force_zip64=large) as record:
        record.writelines(parts)
