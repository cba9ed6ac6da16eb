"""Reading files that `torch.save` wrote: tensors stay in the file until a slice is asked for.

`torch.load` would read the metadata too, which in checkpoints of Megatron holds objects of many
classes, and its safe mode could be made to run code before torch 2.6. Here nothing of the file is
run (`inert_pickle`), and of the tensors only the bytes that are asked for are read.
"""

from __future__ import annotations

import io
import mmap
import zipfile
import zlib
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from mindspeed_rlxf.checkpoint.inert_pickle import Inert, InertUnpickler, read_pickle

LOCAL_HEADER = 30  # bytes before the name and the extra field of a zip record
NO_SUM = 0  # torch.serialization.set_crc32_options(False) writes it in place of a CRC-32

Range = tuple[int, int]
"""[start, stop) of one axis."""


class ChangedBytes(ValueError):
    """A tensor's bytes are not those that were written; seen only when it is read."""


class MappedFile:
    """A file in memory as far as it is touched; its pages can be dropped at any time."""

    def __init__(self, path: Path) -> None:
        """Errors: ValueError when it cannot be opened or is empty."""
        self.path = path
        try:
            with path.open("rb") as file:
                # A private mapping: torch takes writable buffers only, and nothing is written.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise ValueError(f"{path} is missing; copy the whole folder again") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error}); copy it again") from None
        self.size = len(self._map)
        self._checked: set[int] = set()  # records whose sum was right, by their start

    def window(self, offset: int, length: int) -> Window:
        """A part of the file, to be read like a file. Errors: ValueError beyond its end."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(
                f"{self.path} ends at byte {self.size}, a tensor reaches to {offset + length}: "
                "truncated; copy it again"
            )
        return Window(self, offset, length)

    def read(self, offset: int, length: int) -> bytes:
        return self._map[offset : offset + length]

    def tensor(self, offset: int, length: int) -> Tensor:
        """[length] uint8, not copied."""
        self.window(offset, length)
        if length == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=length, offset=offset)

    def check(self, record: Record) -> None:
        """Errors: ChangedBytes. Looks once."""
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
class Record:
    """A file in an uncompressed zip archive. start, length: of its data, bytes in the whole file"""

    name: str
    start: int
    length: int
    crc: int


class Window:
    """A seekable part of a mapped file, with what `zipfile` and `pickle` call."""

    def __init__(self, file: MappedFile, start: int, length: int) -> None:
        self.file, self.start, self.length = file, start, length
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.length - self._at)
        size = left if size is None or size < 0 else min(size, left)
        data = self.file.read(self.start + self._at, size)
        self._at += size
        return data

    def readline(self) -> bytes:
        """Up to a line's end, which old pickles have after their names."""
        data = self.file.read(self.start + self._at, min(self.length - self._at, 1 << 16))
        return self.read(data.find(b"\n") + 1 or -1)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.length)[whence]
        if self._at < 0:
            raise OSError("seek before the start")
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """The mapping stays open."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    offset: of its first element, bytes; stride: in elements, as torch's
    """

    file: MappedFile
    record: Record
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def at(self, index: int) -> StoredTensor:
        """The part with that index of the first axis."""
        assert 0 <= index < self.shape[0], f"index {index} of {self.shape[0]}"
        offset = self.offset + index * self.stride[0] * self.dtype.itemsize
        return replace(self, offset=offset, shape=self.shape[1:], stride=self.stride[1:])

    def read(self, *ranges: Range) -> Tensor:
        """A copy of the named ranges of each axis; one or two axes.

        Errors: ChangedBytes.
        """
        self.file.check(self.record)
        item = self.dtype.itemsize
        if self.stride != contiguous_stride(self.shape):
            return self._whole()[tuple(slice(*r) for r in ranges)].clone()
        data = self.file.tensor(self.offset, prod(self.shape) * item)
        if len(self.shape) == 1:
            ((start, stop),) = ranges
            return data[start * item : stop * item].clone().view(self.dtype)
        (start, stop), (left, right) = ranges
        part = data.view(self.shape[0], self.shape[1] * item)[
            start:stop, left * item : right * item
        ]
        return part.clone(memory_format=torch.contiguous_format).view(self.dtype)

    def _whole(self) -> Tensor:
        elements = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        data = self.file.tensor(self.offset, elements * self.dtype.itemsize)
        return data.clone().view(self.dtype).as_strided(self.shape, self.stride)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements from one index to the next, for each axis, where rows lie one after the other."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    key: str
    elements: int


class _StorageType:
    """`torch.BFloat16Storage` and so on; just the type of its elements."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


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


def read_torch_file(path: Path) -> Any:
    """The saved object, every tensor in it a `StoredTensor`, unknown objects `Inert`.

    Errors: ValueError when the file is missing or damaged.
    """
    file = MappedFile(path)
    return read_window(file.window(0, file.size))


def read_window(window: Window) -> Any:
    """As `read_torch_file`, of a part of a file."""
    path = window.file.path
    try:
        with zipfile.ZipFile(cast(IO[bytes], window)) as archive:
            return _Reader.of(window, archive)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise ValueError(
            f"{path} is no file of torch.save, or is truncated ({error}); copy it again"
        ) from None


class _Reader(InertUnpickler):
    """Unpickles `data.pkl`; tensors become places in the file."""

    file: MappedFile
    records: dict[str, Record]  # by the key of a tensor's data

    @classmethod
    def of(cls, window: Window, archive: zipfile.ZipFile) -> Any:
        names = {info.filename: info for info in archive.infolist()}
        pickled = next((name for name in names if name.endswith("/data.pkl")), None)
        if pickled is None:
            raise ValueError(f"{window.file.path} is no file of torch.save: it has no data.pkl")
        order = next((name for name in names if name.endswith("/byteorder")), None)
        if order is not None and _content(window, names[order]) != b"little":
            raise ValueError(f"{window.file.path} is big-endian; save it on the machine you use")
        prefix = pickled.removesuffix("data.pkl") + "data/"
        data = {n.removeprefix(prefix): i for n, i in names.items() if n.startswith(prefix)}
        content = io.BytesIO(_content(window, names[pickled]))
        try:
            records = {key: _record(window, info) for key, info in data.items()}
            bound = type("BoundReader", (cls,), {"file": window.file, "records": records})
            return read_pickle(content, bound)
        except ValueError as error:
            raise ValueError(f"{window.file.path}: {error}; copy it again") from None

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return _StorageType(STORAGES[name])
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return self._tensor
        if module == "torch._utils" and name == "_rebuild_parameter":
            return _first
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """pid: ("storage", type, key of the record, device, elements)."""
        if not isinstance(pid, tuple) or len(pid) != 5 or not isinstance(pid[1], _StorageType):
            return Inert()
        return _Storage(pid[1].dtype, str(pid[2]), int(pid[4]))

    def _tensor(self, storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> Any:
        if not isinstance(storage, _Storage):
            return Inert()
        shape, stride = tuple(map(int, shape)), tuple(map(int, stride))
        record, item = self.records.get(storage.key), storage.dtype.itemsize
        used = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if all(shape) else 0
        bad = min((offset, *shape, *stride)) < 0 or offset + used > storage.elements
        if record is None or bad or record.length < storage.elements * item:
            raise ValueError(f"a tensor of shape {list(shape)} lies outside its data")
        at = record.start + offset * item
        return StoredTensor(self.file, record, at, storage.dtype, shape, stride)


def _record(window: Window, info: zipfile.ZipInfo) -> Record:
    """Where its data lies: its local header has an extra field of its own length."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed, which torch.save does not do")
    at = window.start + info.header_offset
    header = window.file.read(at, LOCAL_HEADER)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return Record(info.filename, at + LOCAL_HEADER + lengths, info.file_size, info.CRC)


def _content(window: Window, info: zipfile.ZipInfo) -> bytes:
    record = _record(window, info)
    window.file.check(record)
    return window.file.read(record.start, record.length)


def _first(tensor: Any, *_: Any) -> Any:
    return tensor
