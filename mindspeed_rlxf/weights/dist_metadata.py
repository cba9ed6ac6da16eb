"""`.metadata` of a sharded checkpoint: its tensors, and the byte ranges of files with their boxes.

Before a tensor is read, all of it is checked against the files: files are inside the folder, byte
ranges (`Window`) inside their file, and the ranges of a file do not add up to more than the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rlxf.files.plain import open_plain
from mindspeed_rlxf.files.safe import locate_inside
from mindspeed_rlxf.weights.boxes import Box, BoxedTensor, Shape, StoredBox
from mindspeed_rlxf.weights.formats import COMMON, METADATA
from mindspeed_rlxf.weights.inert_pickle import read_pickle
from mindspeed_rlxf.weights.pickle_names import Inert, Refused, are_integers, shorten
from mindspeed_rlxf.weights.refusals import refusal, unreadable
from mindspeed_rlxf.weights.torch_file import (
    MAX_AXES,
    MappedFile,
    StoredTensor,
    Window,
    read_torch_file,
    read_window,
)

MAX_METADATA = 256 << 20  # bytes: 100,000 chunks have 20 million
MAX_SIZE = 1 << 50  # of an axis
SMALL = 4096  # bytes of an object; most are the same, byte for byte


class Metadata:
    """The tensors of a sharded checkpoint by name.

    objects: byte ranges of entries that are no tensors, each a file of torch.save
    """

    def __init__(self, folder: Path, content: Any) -> None:
        """Find the byte ranges of all boxes and objects; maps the data files but reads no tensor.

        content: of the metadata file, as `read_pickle` returns it
        Raises ValueError, TypeError, KeyError or AttributeError where it is damaged.
        """
        self.folder = folder
        self._entries = content.field("state_dict_metadata")
        self._windows, self.objects = _find_windows(folder, content.field("storage_data"))
        if any(type(name) is not str or not name.isprintable() for name in self._entries):
            raise TypeError("an entry without a name")

    def names(self) -> Iterator[str]:
        """Yield the names of the tensors in the order of the file; other entries are left out."""
        for name, entry in self._entries.items():
            if type(entry) is Inert and entry.named.endswith(".TensorStorageMetadata"):
                yield name

    def tensor(self, name: str) -> BoxedTensor:
        """Return a tensor by name; none of its data is read.

        Raises ValueError where the name is unknown, its entry is damaged or the boxes have together
        more or fewer numbers than the tensor.
        """
        with _named_errors(self.folder):
            return self._make_tensor(name, self._entries[name])

    def _make_tensor(self, name: str, entry: Inert) -> BoxedTensor:
        """Make a tensor from its entry; none of its data is read.

        Raises TypeError, KeyError or ValueError for a damaged entry, also if the boxes have
        together more or fewer numbers than the tensor.
        """
        properties, size = entry.field("properties").state, entry.field("size")
        dtype = properties[0] if type(properties) is tuple else properties["dtype"]
        if type(dtype) is not torch.dtype or not _are_sizes(size):
            raise TypeError("a tensor of another kind")
        tensor = BoxedTensor(f"{shorten(name)!r} of {self.folder}", dtype, size, [])
        for box, window in self._read_boxes(name, entry.field("chunks"), size):
            if box.numel * dtype.itemsize > window.length:
                raise ValueError(
                    f"it has boxes of {shorten(name)!r} that are longer than their data"
                )
            tensor.boxes.append(StoredBox(box, partial(_read_box, window, box, dtype)))
        held, needed = sum(stored.box.numel for stored in tensor.boxes), Box((), size).numel
        if held != needed:
            raise ValueError(
                f"it has {held} numbers in the boxes of {shorten(name)!r}, not {needed}"
            )
        return tensor

    def _read_boxes(self, name: str, chunks: Any, size: Shape) -> Iterator[tuple[Box, Window]]:
        """Yield (box, its byte range) for each chunk of a tensor.

        Raises TypeError, KeyError or ValueError for a damaged chunk, one without byte range and one
        outside the tensor.
        """
        if type(chunks) is not list:
            raise TypeError("chunks of another kind")
        for chunk in chunks:
            offsets, sizes = chunk.field("offsets"), chunk.field("sizes")
            if not _are_sizes(sizes) or not len(offsets) == len(sizes) == len(size):
                raise TypeError("a chunk of another kind")
            key = _box_key(name, offsets)
            box = Box(offsets, sizes)
            if any(stop > end for stop, end in zip(box.stops, size, strict=True)):
                raise ValueError(f"it has a box of {shorten(name)!r} that lies outside of it")
            yield box, self._windows[key]


def open_torch_dist(folder: Path) -> Metadata:
    """Read the metadata of a checkpoint folder; check it and all pickled objects of the checkpoint.

    Tensors are not read. Raises ValueError where a file is missing, damaged, over the allowed size,
    does not fit the metadata, or has pickled objects other than data.
    """
    with _named_errors(folder):
        with open_plain(locate_inside(folder, METADATA, METADATA)) as file:
            data = file.read(MAX_METADATA + 1)
        if len(data) > MAX_METADATA:
            raise Refused(f"more than {MAX_METADATA} bytes")
        metadata = Metadata(folder, read_pickle(data))
    _check_objects(metadata)
    return metadata


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    """Turn errors inside the block into a ValueError that names the metadata's file.

    Concerns ValueError (Refused too), OSError, AttributeError, TypeError, KeyError, IndexError. A
    ValueError whose message begins with the folder's path is raised as it is.
    """
    path = folder / METADATA
    try:
        yield
    except Refused as error:
        raise refusal(path, error) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}); copy the folder again") from None
    except (AttributeError, TypeError, KeyError, IndexError) as error:
        other = f"it is not as torch.distributed.checkpoint writes it ({shorten(repr(error))})"
        raise unreadable(path, ValueError(other)) from None
    except ValueError as error:
        if str(error).startswith(str(folder)):  # a sentence about another file
            raise
        raise unreadable(path, error) from None


def _check_objects(metadata: Metadata) -> None:
    """Read all entries that are no tensors, and `common.pt` if it exists, only to check them.

    Raises ValueError where one is damaged or has pickled objects other than data. Of small
    entries with equal bytes only one is checked.
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


def _find_windows(folder: Path, storage: dict[Any, Any]) -> tuple[dict[str, Window], list[Window]]:
    """Return (tensor name and offsets -> byte range of the box, byte ranges of other objects).

    An object that several entries name occurs once. Raises ValueError for a box named twice and for
    ranges of a file that are together longer than the file; ValueError, TypeError, KeyError or
    AttributeError for invalid ones.
    """
    files: dict[str, MappedFile] = {}
    used: dict[str, int] = {}
    boxes: dict[str, Window] = {}
    objects: dict[tuple[str, int, int], Window] = {}
    for index, info in storage.items():
        name, start, length = place = _read_place(info)
        if name not in files:
            files[name], used[name] = MappedFile(locate_inside(folder, name, METADATA)), 0
        offset = index.state.get("offset")  # torch sets none where it is None
        if place in objects and offset is None:
            continue
        window = files[name].window(start, length)
        if offset is None:
            objects[place] = window
        else:
            key = _box_key(index.state["fqn"], offset)
            if key in boxes:
                raise ValueError(f"it names the box {shorten(key)!r} twice")
            boxes[key] = window
        used[name] += length
    for name, length in used.items():
        if length > files[name].size:
            raise ValueError(f"it has parts of {shorten(name)!r} that overlap")
    return boxes, list(objects.values())


def _read_place(info: Any) -> tuple[str, int, int]:
    """Return file name, offset and length (bytes) of one entry of the storage table.

    Raises ValueError for compressed entries; KeyError, TypeError or AttributeError for damage.
    """
    state = info.state
    if state.get("transform_descriptors"):
        raise ValueError("it names compressed entries, which are not read")
    name, start, length = state["relative_path"], state["offset"], state["length"]
    if type(name) is not str or type(start) is not int or type(length) is not int:
        raise TypeError("a place of another kind")
    return name, start, length


def _box_key(name: Any, offsets: Any) -> str:
    """Return name and offsets of a box as one str, a key of the byte ranges.

    A str, because its hash is random in each process: a file cannot choose keys that collide.
    Raises TypeError for other types.
    """
    if type(name) is not str or not _are_sizes(offsets):
        raise TypeError("an index of another kind")
    return f"{name}@{offsets}"


def _are_sizes(numbers: Any) -> bool:
    if not are_integers(numbers) or len(numbers) > MAX_AXES:
        return False
    return not numbers or (min(numbers) >= 0 and max(numbers) < MAX_SIZE)


def _read_box(window: Window, box: Box, dtype: torch.dtype, wanted: Box) -> Tensor:
    """Read the box `wanted` from the byte range in which `box` is stored; returns a copy.

    Both are boxes of the whole tensor. Raises ValueError when a tensor of another shape than that
    of `box`, or another dtype, is stored there.
    """
    stored = read_window(window)
    if type(stored) is not StoredTensor or (stored.shape, stored.dtype) != (box.shape, dtype):
        raise ValueError(
            f"{window.file.path}: no tensor of shape {list(box.shape)} where {METADATA} has one; "
            "copy the folder again"
        )
    return stored.read(wanted.relative_to(box))
