"""Tensors of a role in a checkpoint of a run: boxes in safetensors files, one file per rank.

    state_00003.safetensors     "exp_avg/model.layers.0.mlp.up_proj.weight@128,0": [64, 4096] fp32

A box is one of a Hugging Face tensor, or of what the optimizer holds of that tensor (its slot).
Its name says slot, tensor and where the box begins, the header says dtype, shape and bytes: so the
files are their own index, and a rank of any layout reads the byte ranges that it needs. The padding
of a vocabulary has no Hugging Face name and is not stored: it is zero.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from mindspeed_rlxf.weights.boxes import Box, BoxedTensor, HeldBox, StoredBox
from mindspeed_rlxf.weights.formats import STATE_FILES
from mindspeed_rlxf.weights.inside import inside
from mindspeed_rlxf.weights.pickle_values import shown
from mindspeed_rlxf.weights.planned import PlannedTensor
from mindspeed_rlxf.weights.regular import open_regular
from mindspeed_rlxf.weights.safetensors_file import (
    OF_NAME,
    aligned,
    read_header,
    write_safetensors,
)

WEIGHT = "weight"
BUFFER_BYTES = 8 << 20


class StateReader(Protocol):
    """Boxes of a role's tensors, by slot and Hugging Face name; counts the bytes."""

    folder: Path

    @property
    def bytes_read(self) -> int: ...

    def has(self, slot: str, name: str) -> bool: ...

    def dtype_of(self, slot: str, name: str) -> torch.dtype: ...

    def read_box(self, slot: str, name: str, box: Box) -> Tensor: ...

    def close(self) -> None: ...


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"state_{rank:05d}.safetensors"


def write_boxes(file: Path, boxes: Iterable[HeldBox]) -> None:
    """Write the file of a rank and have it on the disk on return."""
    planned: dict[str, PlannedTensor] = {}
    for held in boxes:
        key = f"{held.slot}/{held.name}@{','.join(map(str, held.box.starts))}"
        assert key not in planned, f"{key} is written twice"
        planned[key] = PlannedTensor.of(held.tensor)
    write_safetensors(file, aligned(planned), lambda _: None)


class RunState:
    """The tensors in a folder; reads byte ranges, and counts the bytes.

    Also a `WeightReader` of the weights. Errors: ValueError where a file is damaged, OSError where
    it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._tensors: dict[tuple[str, str], BoxedTensor] = {}
        for file in sorted(folder.glob(STATE_FILES)):
            self._add_file(inside(folder, file.name, STATE_FILES))
        self._open: dict[Path, IO[bytes]] = {}
        self._files = ExitStack()

    def _add_file(self, file: Path) -> None:
        try:
            header, data, end = read_header(file)
            for key, about in header.items():
                self._add_box(file, key, about, data, end)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is damaged or truncated ({error}); copy it again") from None

    def _add_box(self, file: Path, key: str, about: dict[str, Any], data: int, end: int) -> None:
        """Check and keep where a box is. data, end: of the data in the file, bytes"""
        slot, _, place = key.partition("/")
        name, _, corner = place.rpartition("@")
        shape, dtype = tuple(about["shape"]), OF_NAME[about["dtype"]]
        first, last = about["data_offsets"]
        if not name.isprintable() or {type(n) for n in (first, last, *shape)} != {int}:
            raise ValueError("a box has numbers of another kind")
        starts = tuple(int(n) if n.isdecimal() and len(n) < 19 else -1 for n in corner.split(","))
        fits = first >= 0 and data + last <= end and last - first == prod(shape) * dtype.itemsize
        axes = len(shape)
        known = self._tensors.get((slot, name), BoxedTensor(f"{slot} of {name}", dtype, shape, []))
        if not name or not fits or axes not in (1, 2) or min(shape + starts) < 0:
            raise ValueError(f"{shown(key)} is no box of a tensor")
        if not axes == len(starts) == len(known.size) or known.dtype != dtype:
            raise ValueError(f"{shown(key)} is no box of the tensor of that name")
        box = Box(starts, shape)
        known.boxes.append(StoredBox(box, partial(self._read, file, data + first, box, dtype)))
        size = tuple(map(max, known.size, box.stops))
        self._tensors[slot, name] = replace(known, size=size)

    def _read(self, file: Path, start: int, stored: Box, dtype: torch.dtype, box: Box) -> Tensor:
        """start: of the stored box in the file, bytes. At once where whole rows are read."""
        if file not in self._open:
            self._open[file] = self._files.enter_context(open_regular(file))
        result = torch.empty(box.shape, dtype=dtype)
        target = memoryview(result.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        width, whole_rows = prod(stored.shape[1:]), box.shape[1:] == stored.shape[1:]
        done = 0
        for rows in [box] if whole_rows else box.split(1):
            inner = rows.within(stored).starts
            number = inner[0] * width + sum(inner[1:])
            end = done + rows.numel * dtype.itemsize
            read_into(self._open[file], start + number * dtype.itemsize, target[done:end])
            done = end
        return result

    def close(self) -> None:
        self._open.clear()
        self._files.close()

    def has(self, slot: str, name: str) -> bool:
        return (slot, name) in self._tensors

    def dtype_of(self, slot: str, name: str) -> torch.dtype:
        return self._tensors[slot, name].dtype

    def read_box(self, slot: str, name: str, box: Box) -> Tensor:
        """Read just the bytes of a box. Errors: ValueError where the files lack some of them."""
        result = self._tensors[slot, name].read(box)
        self.bytes_read += result.nbytes
        return result

    def __contains__(self, name: str) -> bool:
        return self.has(WEIGHT, name)

    def names(self) -> list[str]:
        return [name for slot, name in self._tensors if slot == WEIGHT]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[WEIGHT, name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.dtype_of(WEIGHT, name)

    def read(self, name: str, box: Box) -> Tensor:
        return self.read_box(WEIGHT, name, box)


def read_into(file: IO[bytes], offset: int, target: memoryview) -> None:
    """Fill `target` with the bytes of a file. Errors: ValueError where it ends early."""
    done = 0
    while done < len(target):
        count = os.preadv(file.fileno(), [target[done:]], offset + done)
        if count == 0:
            raise ValueError(f"{file.name} is truncated; copy it again")
        done += count
