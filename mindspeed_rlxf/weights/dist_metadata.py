"""`.metadata` of a sharded checkpoint: which tensors it has, and where their chunks lie.

Everything it says is checked against the files before a tensor is made of it: names stay in the
folder, ranges in their file, and all ranges of a file together are not longer than the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from mindspeed_rlxf.files.plain import open_plain
from mindspeed_rlxf.files.safe import locate_inside
from mindspeed_rlxf.weights.formats import COMMON, METADATA
from mindspeed_rlxf.weights.inert_pickle import read_pickle
from mindspeed_rlxf.weights.pickle_names import Inert, integers
from mindspeed_rlxf.weights.pickle_values import Refused, shown
from mindspeed_rlxf.weights.refusals import refusal, unreadable
from mindspeed_rlxf.weights.torch_file import (
    MAX_AXES,
    MappedFile,
    Window,
    read_torch_file,
    read_window,
)

MAX_METADATA = 256 << 20  # bytes: 100,000 chunks have 20 million
MAX_SIZE = 1 << 50  # of an axis
SMALL = 4096  # bytes of an object; most are the same, byte for byte

Place = tuple[MappedFile, int, int]
"""File, offset and length, bytes; of a `Window`"""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk, by axis."""


@dataclass(frozen=True)
class Described:
    """A global tensor, as `.metadata` has it; its chunks and where each one lies."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: tuple[tuple[Box, Window], ...]


class Metadata:
    """objects: what is no tensor; each an archive of its own"""

    def __init__(self, folder: Path, content: Any) -> None:
        """content: of the file"""
        self.folder = folder
        self._entries = content.field("state_dict_metadata")
        self._places, self.objects = _Files(folder).places(content.field("storage_data"))
        if any(type(name) is not str or not name.isprintable() for name in self._entries):
            raise TypeError("an entry without a name")

    def names(self) -> Iterator[str]:
        """Of tensors."""
        for name, entry in self._entries.items():
            if type(entry) is Inert and entry.named.endswith(".TensorStorageMetadata"):
                yield name

    def tensor(self, name: str) -> Described:
        """Errors: ValueError where its chunks are not all of it."""
        with _told(self.folder):
            return _tensor(name, self._entries[name], self._places)


def read_metadata(folder: Path) -> Metadata:
    """Errors: ValueError where it is missing, damaged, or does not fit the files."""
    with _told(folder):
        with open_plain(locate_inside(folder, METADATA, METADATA)) as file:
            data = file.read(MAX_METADATA + 1)
        if len(data) > MAX_METADATA:
            raise Refused(f"more than {MAX_METADATA} bytes")
        return Metadata(folder, read_pickle(data))


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Errors as sentences that name the file."""
    path = folder / METADATA
    try:
        yield
    except Refused as error:
        raise refusal(path, error) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}); copy the folder again") from None
    except (AttributeError, TypeError, KeyError, IndexError) as error:
        other = f"it is not as torch.distributed.checkpoint writes it ({shown(repr(error))})"
        raise unreadable(path, ValueError(other)) from None
    except ValueError as error:
        if str(error).startswith(str(folder)):  # a sentence about another file
            raise
        raise unreadable(path, error) from None


def check_objects(metadata: Metadata) -> None:
    """Read what is no tensor: a folder that holds more than data is not used for its tensors.

    Errors: ValueError
    """
    seen: set[bytes] = set()
    for window in metadata.objects:
        data = window.read(0, window.length) if window.length <= SMALL else b""
        if not data or data not in seen:
            read_window(window)
            seen.add(data)
    common = metadata.folder / COMMON
    if common.exists():
        read_torch_file(locate_inside(metadata.folder, COMMON, METADATA))


class _Files:
    """The files that a folder's `.metadata` names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mapped: dict[str, MappedFile] = {}
        self._used: dict[str, int] = {}

    def places(self, storage: dict[Any, Any]) -> tuple[dict[str, Place], list[Window]]:
        """Of chunks by name and offsets, and of objects."""
        chunks: dict[str, Place] = {}
        objects: dict[tuple[str, int, int], Place] = {}
        for index, info in storage.items():
            name, start, length = named = _place(info)
            file = self._mapped.get(name) or self._map(name)
            if start < 0 or length < 0 or start + length > file.size:
                file.window(start, length)  # says so
            offset = index.state.get("offset")  # torch sets none where it is None
            if offset is None and named in objects:
                continue
            if offset is None:
                objects[named] = (file, start, length)
            else:
                key = _key(index.state["fqn"], offset)
                if key in chunks:
                    raise ValueError(f"it names the chunk {shown(key)!r} twice")
                chunks[key] = (file, start, length)
            self._used[name] += length
        for name, used in self._used.items():
            if used > self._mapped[name].size:
                raise ValueError(f"it has parts of {shown(name)!r} that lie over each other")
        return chunks, [Window(*place) for place in objects.values()]

    def _map(self, name: str) -> MappedFile:
        self._mapped[name] = MappedFile(locate_inside(self.folder, name, METADATA))
        self._used[name] = 0
        return self._mapped[name]


def _place(info: Any) -> tuple[str, int, int]:
    """File, offset and length of one entry, bytes."""
    state = info.state
    if state.get("transform_descriptors"):
        raise ValueError("it names compressed entries, which are not read")
    name, start, length = state["relative_path"], state["offset"], state["length"]
    if type(name) is not str or type(start) is not int or type(length) is not int:
        raise TypeError("a place of another kind")
    return name, start, length


def _key(name: Any, offsets: Any) -> str:
    """As text, whose hash no file can foresee."""
    if type(name) is not str or not _is_box(offsets):
        raise TypeError("an index of another kind")
    return f"{name}@{offsets}"


def _is_box(numbers: Any) -> bool:
    if not integers(numbers) or len(numbers) > MAX_AXES:
        return False
    return not numbers or (min(numbers) >= 0 and max(numbers) < MAX_SIZE)


def _tensor(name: str, entry: Inert, places: dict[str, Place]) -> Described:
    properties, size = entry.field("properties").state, entry.field("size")
    dtype = properties[0] if type(properties) is tuple else properties["dtype"]
    if type(dtype) is not torch.dtype or not _is_box(size):
        raise TypeError("a tensor of another kind")
    chunks = tuple(_chunks(name, entry.field("chunks"), size, places))
    held = sum(prod(sizes) for (_, sizes), _ in chunks)
    if held != prod(size):
        raise ValueError(
            f"it has {held} numbers in the chunks of {shown(name)!r}, not {prod(size)}"
        )
    if any(prod(sizes) * dtype.itemsize > window.length for (_, sizes), window in chunks):
        raise ValueError(f"it has chunks of {shown(name)!r} that are longer than their place")
    return Described(dtype, size, chunks)


def _chunks(
    name: str, chunks: Any, size: tuple[int, ...], places: dict[str, Place]
) -> Iterator[tuple[Box, Window]]:
    if type(chunks) is not list:
        raise TypeError("chunks of another kind")
    for chunk in chunks:
        offsets, sizes = chunk.field("offsets"), chunk.field("sizes")
        if not _is_box(sizes) or not len(offsets) == len(sizes) == len(size):
            raise TypeError("a chunk of another kind")
        key = _key(name, offsets)
        if any(o + n > all_ for o, n, all_ in zip(offsets, sizes, size, strict=True)):
            raise ValueError(f"it has a chunk of {shown(name)!r} that lies outside of it")
        yield (offsets, sizes), Window(*places[key])
