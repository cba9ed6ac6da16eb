"""The tensors of a sharded checkpoint (`torch_dist`), read box by box."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rlxf.weights.boxes import Box, BoxedTensor, StoredBox
from mindspeed_rlxf.weights.formats import COMMON, METADATA
from mindspeed_rlxf.weights.pickled import read_metadata, read_torch_bytes, read_torch_file

Place = tuple[str, int, int]
"""File, offset and length (bytes) of a stored tensor, which is a file of torch.save in itself."""


class Metadata:
    """The tensors of a sharded checkpoint by name."""

    def __init__(self, folder: Path, trust_files: bool = False) -> None:
        """Read `.metadata` of the folder, and `common.pt` to check that it holds only data.

        Raises ValueError if one of them is missing or damaged, or has anything but data.
        """
        self.folder, self._trust_files = folder, trust_files
        self._last: tuple[Place, Tensor] | None = None  # several boxes are read from one
        content = read_metadata(folder / METADATA)
        try:
            self._entries = {
                str(name): entry.state
                for name, entry in content.state["state_dict_metadata"].items()
                if type(entry).__name__ == "TensorStorageMetadata"
            }
            self._places = dict(map(_read_place, content.state["storage_data"].items()))
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise self._damaged(error) from None
        ends: dict[str, int] = {}
        for file, offset, length in self._places.values():
            ends[file] = max(ends.get(file, 0), offset + length)
        for file, end in ends.items():
            self._check_size(folder / file, end)
        if (folder / COMMON).exists():
            read_torch_file(folder / COMMON, trust_files)

    def names(self) -> Iterator[str]:
        """Yield the names of the tensors in the order of the file."""
        yield from self._entries

    def tensor(self, name: str) -> BoxedTensor:
        """Return a tensor by name; none of its data is read. Raises ValueError if it is damaged."""
        try:
            entry = self._entries[name]
            properties = entry["properties"].state
            dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
            tensor = BoxedTensor(f"{name} of {self.folder}", dtype, tuple(entry["size"]), [])
            for chunk in entry["chunks"]:
                box = Box(tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"]))
                read = partial(self._read, self._places[name, box.starts], box, dtype)
                tensor.boxes.append(StoredBox(box, read))
            if not isinstance(dtype, torch.dtype) or any(
                len(stored.box.starts) != len(tensor.size) for stored in tensor.boxes
            ):
                raise TypeError(f"the entry of {name}")
        except (AttributeError, TypeError, KeyError, IndexError) as error:
            raise self._damaged(error) from None
        return tensor

    def _damaged(self, error: Exception) -> ValueError:
        path = self.folder / METADATA
        return ValueError(
            f"{path} is not as torch.distributed.checkpoint writes it ({error!r:.200}); copy the "
            "folder again"
        )

    def _check_size(self, path: Path, end: int) -> None:
        """Raise ValueError if a file is missing or ends before the byte `end`."""
        size = path.stat().st_size if path.is_file() else 0
        if size < end:
            rule = f"{path} is missing or truncated: {size} of {end} bytes are there"
            raise ValueError(f"{rule}; copy it again")

    def _read(self, place: Place, box: Box, dtype: torch.dtype, wanted: Box) -> Tensor:
        """Return a copy of the box `wanted` of the tensor, from the place where `box` is stored."""
        if self._last is None or self._last[0] != place:
            self._last = None  # one of them is in memory at a time
            self._last = place, self._load(place, box, dtype)
        return self._last[1][wanted.relative_to(box).slices].clone()

    def _load(self, place: Place, box: Box, dtype: torch.dtype) -> Tensor:
        name, offset, length = place
        path = self.folder / name
        with path.open("rb") as file:
            file.seek(offset)
            stored = read_torch_bytes(file.read(length), path, self._trust_files)
        if not isinstance(stored, Tensor) or (stored.shape, stored.dtype) != (box.shape, dtype):
            raise ValueError(
                f"{path}: no tensor of shape {list(box.shape)} where {METADATA} has one; copy the "
                "folder again"
            )
        return stored


def _read_place(entry: tuple[Any, Any]) -> tuple[tuple[str, tuple[int, ...]], Place]:
    """Return ((tensor name, first element of its box), where it is stored) of an entry.

    Raises ValueError for compressed entries and files outside of the folder, and KeyError,
    TypeError or AttributeError for damage.
    """
    index, info = (each.state for each in entry)
    if info.get("transform_descriptors"):
        raise ValueError("compressed entries are not read")
    name, offset, length = info["relative_path"], info["offset"], info["length"]
    if Path(name).name != name or min(offset, length) < 0:
        raise ValueError(f"no place: {name!r:.80}, {offset}, {length}")
    return (index["fqn"], tuple(index.get("offset") or ())), (name, offset, length)
