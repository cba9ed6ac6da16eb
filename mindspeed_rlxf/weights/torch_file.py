"""Reading files that `torch.save` wrote: tensors stay in the file until a slice is asked for.

`torch.load` would read the metadata too, which in checkpoints of Megatron holds objects of many
classes, and its safe mode could be made to run code before torch 2.6. Here nothing of the file is
run (`inert_pickle`), and of the tensors only the bytes that are asked for are read.
"""

from __future__ import annotations

import mmap
import zlib
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rlxf.files.plain import open_plain
from mindspeed_rlxf.weights.inert_pickle import InertUnpickler
from mindspeed_rlxf.weights.pickle_names import OF_STORAGE, TYPED, Storage
from mindspeed_rlxf.weights.pickle_values import Refused
from mindspeed_rlxf.weights.refusals import refusal, unreadable
from mindspeed_rlxf.weights.zip_records import PICKLE, Record, records_of

NO_SUM = 0  # torch.serialization.set_crc32_options(False) writes it in place of a CRC-32
MAX_PICKLE = 64 << 20  # bytes; the largest of Megatron have a few million
MAX_AXES = 8

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
class Window:
    """A part of a mapped file. start, length: bytes"""

    file: MappedFile
    start: int
    length: int

    def read(self, offset: int, length: int) -> bytes:
        """Fewer at its end."""
        return self.file.read(self.start + offset, max(0, min(length, self.length - offset)))


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


def read_torch_file(path: Path) -> Any:
    """The saved object, every tensor in it a `StoredTensor`, other objects `Inert`.

    Errors: ValueError when the file is missing or damaged, or holds more than data.
    """
    file = MappedFile(path)
    return read_window(file.window(0, file.size))


def read_window(window: Window) -> Any:
    """As `read_torch_file`, of a part of a file."""
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
    """Reads `data.pkl`; tensors become places in the file."""

    def __init__(self, window: Window, records: dict[str, Record]) -> None:
        found = records[PICKLE]
        if found.length > MAX_PICKLE:
            raise Refused(f"a pickle of {found.length} bytes, the limit is {MAX_PICKLE}")
        super().__init__(_content(window, found))
        self._window, self._records = window, records

    @classmethod
    def of(cls, window: Window) -> _Reader:
        path = window.file.path
        records = records_of(window.read, window.length)
        if PICKLE not in records:
            raise ValueError(f"{path} is no file of torch.save: it has no {PICKLE}")
        order = records.get("byteorder")
        if order is not None and (order.length != 6 or _content(window, order) != b"little"):
            raise ValueError(f"{path} is big-endian; save it on the machine you use")
        return cls(window, records)

    def storage(self, dtype: str, key: str, elements: int) -> _Storage:
        record, kind = self._records.get(f"data/{key}"), STORAGES.get(dtype)
        if kind is None:
            raise Refused(f"a tensor of {dtype}")
        if record is None or elements < 0 or record.length < elements * kind.itemsize:
            raise ValueError(f"a tensor of {elements} numbers lies outside its data")
        at = self._window.start + record.start
        return _Storage(kind, Record(record.name, at, record.length, record.crc), elements)

    def tensor(self, function: str, arguments: tuple[Any, ...]) -> StoredTensor:
        """Also of a parameter, and of a tensor with attributes, which hold a tensor."""
        if function == TYPED:
            function, arguments = arguments[0].text, arguments[2]
        if function not in OF_STORAGE:
            if type(arguments[0]) is not StoredTensor:
                raise Refused("a parameter that is no tensor")
            return arguments[0]
        storage, offset, shape, stride = arguments[:4]
        if not isinstance(storage, _Storage) or len(shape) > MAX_AXES or len(shape) != len(stride):
            raise Refused("a tensor that torch does not write")
        used = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if all(shape) else 0
        bad = min((offset, *shape, *stride)) < 0 or offset + used > storage.elements
        if bad or prod(shape) > storage.elements:
            raise ValueError(f"a tensor of shape {list(shape)} lies outside its data")
        at = storage.record.start + offset * storage.dtype.itemsize
        file = self._window.file
        return StoredTensor(file, storage.record, at, storage.dtype, shape, stride)


def _content(window: Window, record: Record) -> bytes:
    """record: as it lies in the window"""
    start = window.start + record.start
    window.file.check(Record(record.name, start, record.length, record.crc))
    return window.file.read(start, record.length)
