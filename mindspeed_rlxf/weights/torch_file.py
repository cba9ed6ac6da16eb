"""Files of `torch.save`, read without running them and written one tensor at a time.

`torch.load` would unpickle everything beside the tensors, in checkpoints of Megatron objects of
many classes. Before torch 2.6 its safe mode could be made to run code. Here no code of the file is
run (`inert_pickle`). A tensor stays in the file until a box of it is read.

`torch.save` wants every tensor at once. The file that is written here is the same: an uncompressed
zip archive with the pickled object in `data.pkl` and the bytes of each tensor in a record of its
own, aligned so that they can be mapped into memory.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from mindspeed_rlxf.files.plain import open_plain
from mindspeed_rlxf.weights.boxes import Box
from mindspeed_rlxf.weights.inert_pickle import InertUnpickler
from mindspeed_rlxf.weights.pickle_names import OF_STORAGE, TYPED, Refused, Storage
from mindspeed_rlxf.weights.planned import PlannedTensor, Wrote
from mindspeed_rlxf.weights.refusals import refusal, unreadable
from mindspeed_rlxf.weights.zip_records import PADDING_FIELD, PICKLE, Record, records_of

NO_SUM = 0  # torch.serialization.set_crc32_options(False) writes it in place of a CRC-32
MAX_PICKLE = 64 << 20  # bytes; the largest of Megatron have a few million
MAX_AXES = 8
ALIGNMENT = 64  # of a tensor that is written, bytes, as torch's
ZIP64_EXTRA = 20  # bytes that zipfile adds to the header of a record over 2 GiB
LOCAL_HEADER = 30  # bytes before the name of a record


class ChangedBytes(ValueError):
    """The bytes of a record differ from its CRC-32."""


class MappedFile:
    """A file that is mapped into memory; if it is cut short later, a read ends the process."""

    def __init__(self, path: Path) -> None:
        """Map the file into memory. Raises ValueError when it cannot be opened or is empty."""
        self.path = path
        try:
            with open_plain(path) as file:
                # A private mapping: torch takes writable buffers only, and nothing is written.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise ValueError(f"{path} is missing; copy the whole folder again") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error}); copy it again") from None
        self.size = len(self._map)
        self._checked: set[int] = set()  # records whose sum was right, by their start

    def window(self, offset: int, length: int) -> Window:
        """Return a byte range of the file. Raises ValueError where it exceeds the file."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(
                f"{self.path} ends at byte {self.size}, a tensor reaches to {offset + length}: "
                "truncated; copy it again"
            )
        return Window(self, offset, length)

    def read(self, offset: int, length: int) -> bytes:
        return self._map[offset : offset + length]

    def tensor(self, offset: int, length: int) -> Tensor:
        """Return bytes of the file as a tensor [length] uint8, without a copy.

        For no bytes it is an empty tensor. Raises as `window` where the range is not in the file.
        """
        self.window(offset, length)
        if length == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=length, offset=offset)

    def content(self, record: Record) -> bytes:
        """Return the data of a record. Raises ChangedBytes where its CRC-32 differs."""
        self.check(record)
        return self.read(record.start, record.length)

    def check(self, record: Record) -> None:
        """Compare the CRC-32 of a record with its data, unless that was done already.

        A record without a sum (NO_SUM) passes. Raises ChangedBytes where they differ.
        """
        if record.start in self._checked:
            return
        with memoryview(self._map)[record.start : record.start + record.length] as data:
            found = zlib.crc32(data)
        if record.crc not in (found, NO_SUM):
            raise ChangedBytes(
                f"{self.path}: the bytes of {record.name} are not those that were written (CRC-32 "
                f"{found:08x}, not {record.crc:08x}); copy it again"
            )
        self._checked.add(record.start)


@dataclass(frozen=True)
class Window:
    """A byte range of a mapped file. start, length: bytes"""

    file: MappedFile
    start: int
    length: int

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes from `offset` in the range on, fewer at its end."""
        return self.file.read(self.start + offset, max(0, min(length, self.length - offset)))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    offset: of its first element, bytes; stride: elements from one index to the next, by axis
    """

    file: MappedFile
    record: Record
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self, box: Box) -> Tensor:
        """Return a copy of a box of the tensor.

        Raises ChangedBytes where the CRC-32 of the tensor's record differs.
        """
        self.file.check(self.record)
        item = self.dtype.itemsize
        used = _used_elements(self.shape, self.stride)
        # Bytes in an axis of their own: the data need not be aligned for the dtype.
        numbers = self.file.tensor(self.offset, used * item).as_strided(
            (*self.shape, item), (*(step * item for step in self.stride), 1)
        )
        part = numbers[box.slices].clone(memory_format=torch.contiguous_format)
        return part.view(self.dtype).squeeze(-1)


def _used_elements(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of stored elements from a strided tensor's first to last; 0 if empty."""
    if not all(shape):
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


@dataclass(frozen=True)
class _Storage(Storage):
    dtype: torch.dtype
    record: Record
    elements: int


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


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save without running its code.

    Returns the saved object, with a `StoredTensor` for each tensor and `Inert` for other objects.
    Raises ValueError when the file is missing or damaged, or has objects other than data.
    """
    file = MappedFile(path)
    return read_window(file.window(0, file.size))


def read_window(window: Window) -> Any:
    """Read the file of torch.save in a byte range; result and errors as of `read_torch_file`."""
    path = window.file.path
    try:
        return _Reader.of(window).load()
    except Refused as error:
        raise refusal(path, error) from None
    except ChangedBytes:
        raise
    except ValueError as error:
        raise unreadable(path, error) from None


class _Reader(InertUnpickler):
    """Reads `data.pkl`; each tensor becomes a `StoredTensor`."""

    def __init__(self, window: Window, records: dict[str, Record]) -> None:
        found = records[PICKLE]
        if found.length > MAX_PICKLE:
            raise Refused(f"a pickle of {found.length} bytes, the limit is {MAX_PICKLE}")
        super().__init__(window.file.content(found))
        self._file, self._records = window.file, records

    @classmethod
    def of(cls, window: Window) -> _Reader:
        """Make a reader of the zip archive in `window`.

        Raises ValueError for an archive without PICKLE, a damaged one, and one with a record
        `byteorder` other than "little".
        """
        path = window.file.path
        records = records_of(window.read, window.length)
        if window.start:
            records = {n: replace(r, start=r.start + window.start) for n, r in records.items()}
        if PICKLE not in records:
            raise ValueError(f"{path} is no file of torch.save: it has no {PICKLE}")
        order = records.get("byteorder")
        if order is not None and (order.length != 6 or window.file.content(order) != b"little"):
            raise ValueError(f"{path} is big-endian; save it on the machine you use")
        return cls(window, records)

    def storage(self, dtype: str, key: str, elements: int) -> _Storage:
        """Return the storage of a tensor: dtype, record of the archive, number of elements.

        dtype: name of the storage's class. Raises Refused for an unknown class, ValueError where
        the record is missing or too short.
        """
        record, kind = self._records.get(f"data/{key}"), STORAGES.get(dtype)
        if kind is None:
            raise Refused(f"a tensor of {dtype}")
        if record is None or elements < 0 or record.length < elements * kind.itemsize:
            raise ValueError(f"a tensor of {elements} numbers lies outside its data")
        return _Storage(kind, record, elements)

    def tensor(self, function: str, arguments: tuple[Any, ...]) -> StoredTensor:
        """Return the StoredTensor that a function in `TENSORS` would make; attributes are dropped.

        For a parameter, returns its tensor. Raises Refused for arguments that torch does not write,
        ValueError for a tensor that lies outside its storage.
        """
        if function == TYPED:
            function, arguments = arguments[0].text, arguments[2]
        if function not in OF_STORAGE:
            if type(arguments[0]) is not StoredTensor:
                raise Refused("a parameter that is no tensor")
            return arguments[0]
        storage, offset, shape, stride = arguments[:4]
        if not isinstance(storage, _Storage) or len(shape) > MAX_AXES or len(shape) != len(stride):
            raise Refused("a tensor that torch does not write")
        bad = min((offset, *shape, *stride)) < 0 or prod(shape) > storage.elements
        if bad or offset + _used_elements(shape, stride) > storage.elements:
            raise ValueError(f"a tensor of shape {list(shape)} lies outside its data")
        at = storage.record.start + offset * storage.dtype.itemsize
        return StoredTensor(self._file, storage.record, at, storage.dtype, shape, stride)


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
