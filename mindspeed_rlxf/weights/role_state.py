"""Tensors of a role in a checkpoint of a run: pieces in safetensors files, one file per rank.

    state_00003.safetensors     "exp_avg/model.layers.0.mlp.up_proj.weight@128,0": [64, 4096] fp32

A piece is a box of a Hugging Face tensor, or of what the optimizer holds of that tensor (its slot).
Its name says slot, tensor and where the box begins, the header says dtype, shape and bytes: so the
files are their own index, and a rank of any layout reads the byte ranges that it needs. The padding
of a vocabulary has no Hugging Face name and is not stored: it is zero.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from mindspeed_rlxf.files.plain import open_plain, parse_json
from mindspeed_rlxf.files.safe import locate_inside
from mindspeed_rlxf.models.parameters import Slice
from mindspeed_rlxf.weights.boxes import Box, whole
from mindspeed_rlxf.weights.formats import STATE_FILES
from mindspeed_rlxf.weights.pickle_values import shown
from mindspeed_rlxf.weights.safetensors_writer import DTYPES, write_safetensors
from mindspeed_rlxf.weights.torch_file_writer import PlannedTensor

WEIGHT = "weight"
BUFFER_BYTES = 8 << 20
MAX_HEADER_BYTES = 32 << 20  # 300,000 pieces of one rank
OF_NAME = {name: dtype for dtype, name in DTYPES.items()}


class StateReader(Protocol):
    """Boxes of a role's tensors, by slot and Hugging Face name; counts the bytes."""

    folder: Path

    @property
    def bytes_read(self) -> int: ...

    def has(self, slot: str, name: str) -> bool: ...

    def dtype_of(self, slot: str, name: str) -> torch.dtype: ...

    def read_box(self, slot: str, name: str, box: Box) -> Tensor: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, to be written.

    tensor: [height, width] on the host; one axis where the Hugging Face tensor has one
    """

    slot: str
    name: str
    top: int
    left: int
    tensor: Tensor


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor in a file. start: of its first number in the file, bytes"""

    file: Path
    start: int
    dtype: torch.dtype
    box: Box
    axes: int


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"state_{rank:05d}.safetensors"


def write_pieces(file: Path, pieces: Iterable[Piece]) -> None:
    """Write the file of a rank and have it on the disk on return."""
    planned = {}
    for piece in sorted(pieces, key=lambda piece: -piece.tensor.itemsize):  # so all are aligned
        corner = (piece.top, piece.left)[: piece.tensor.dim()]
        key = f"{piece.slot}/{piece.name}@{','.join(map(str, corner))}"
        assert key not in planned, f"{key} is written twice"
        tensor = piece.tensor
        planned[key] = PlannedTensor(tuple(tensor.shape), tensor.dtype, lambda t=tensor: t)  # type: ignore[misc]
    write_safetensors(file, planned, lambda _: None)


class RunState:
    """The pieces in a folder; reads byte ranges, and counts the bytes.

    Also a `WeightReader` of the weights. Errors: ValueError where a file is damaged, OSError where
    it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._pieces: dict[tuple[str, str], list[StoredPiece]] = {}
        for file in sorted(folder.glob(STATE_FILES)):
            for slot, name, piece in _stored_pieces(locate_inside(folder, file.name, STATE_FILES)):
                self._pieces.setdefault((slot, name), []).append(piece)
        self._open: dict[Path, IO[bytes]] = {}
        self._files = ExitStack()

    def close(self) -> None:
        self._open.clear()
        self._files.close()

    def has(self, slot: str, name: str) -> bool:
        return (slot, name) in self._pieces

    def dtype_of(self, slot: str, name: str) -> torch.dtype:
        return self._pieces[slot, name][0].dtype

    def read_box(self, slot: str, name: str, box: Box) -> Tensor:
        """[height, width], from the byte ranges of the pieces that the box touches.

        Errors: ValueError where the files do not have all of it.
        """
        if any(piece.dtype != self.dtype_of(slot, name) for piece in self._pieces[slot, name]):
            raise ValueError(f"{self.folder} has pieces of {name} in several dtypes; copy it again")
        result = torch.zeros(box.height, box.width, dtype=self.dtype_of(slot, name))
        filled = 0
        for piece in self._pieces[slot, name]:
            shared = box.overlap(piece.box)
            if shared is not None:
                self._read_into(result, box, piece, shared)
                filled += shared.numel
        if filled != box.numel:
            raise ValueError(
                f"{self.folder} must have all of {slot} of {name}, it has {filled} of the "
                f"{box.numel} numbers of {box}; copy the whole folder again"
            )
        return result

    def _read_into(self, result: Tensor, box: Box, piece: StoredPiece, shared: Box) -> None:
        """result: of `box`; at once where rows lie one after the other in both, else row by row."""
        item = piece.dtype.itemsize
        target = memoryview(result.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        joined = shared.width == box.width == piece.box.width
        for part in [shared] if joined else shared.in_rows(shared.width):
            inside, outside = (
                (part.top - of.top) * of.width + part.left - of.left for of in (piece.box, box)
            )
            count = part.numel * item
            self._read(piece, piece.start + inside * item, target[outside * item :][:count])

    def _read(self, piece: StoredPiece, offset: int, target: memoryview) -> None:
        if piece.file not in self._open:
            self._open[piece.file] = self._files.enter_context(open_plain(piece.file))
        done = 0
        while done < len(target):
            count = os.preadv(self._open[piece.file].fileno(), [target[done:]], offset + done)
            if count == 0:
                raise ValueError(f"{piece.file} is truncated; copy it again")
            done += count
        self.bytes_read += done

    def __contains__(self, name: str) -> bool:
        return self.has(WEIGHT, name)

    def names(self) -> list[str]:
        return [name for slot, name in self._pieces if slot == WEIGHT]

    def shape(self, name: str) -> tuple[int, ...]:
        pieces = self._pieces[WEIGHT, name]
        ends = (max(p.box.bottom for p in pieces), max(p.box.right for p in pieces))
        return ends[: pieces[0].axes]

    def dtype(self, name: str) -> torch.dtype:
        return self.dtype_of(WEIGHT, name)

    def read(self, part: Slice) -> Tensor:
        """Just the bytes of one slice."""
        box, shape = whole(self.shape(part.source)), self.shape(part.source)
        along = Box(part.start, part.stop, box.left, box.right)
        across = Box(box.top, box.bottom, part.start, part.stop)
        found = self.read_box(WEIGHT, part.source, across if part.dim else along)
        return found.view(-1) if len(shape) == 1 else found


def _stored_pieces(file: Path) -> list[tuple[str, str, StoredPiece]]:
    """Slot, name and place of each piece. Errors: ValueError for what we do not write."""
    try:
        with open_plain(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header has {length} bytes")
            text = stream.read(length)
            if len(text) != length:
                raise ValueError("its header is cut short")
            header = parse_json(text)
            size = stream.seek(0, os.SEEK_END)
        return [
            _stored_piece(file, key, about, 8 + length, size)
            for key, about in header.items()
            if key != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged or truncated ({error}); copy it again") from None


def _stored_piece(
    file: Path, key: str, about: dict[str, Any], data: int, size: int
) -> tuple[str, str, StoredPiece]:
    slot, _, place = key.partition("/")
    name, _, corner = place.rpartition("@")
    shape, dtype = tuple(about["shape"]), OF_NAME[about["dtype"]]
    first, last = about["data_offsets"]
    if not name.isprintable() or {type(n) for n in (first, last, *shape)} != {int}:
        raise ValueError("a piece has numbers of another kind")
    start = tuple(int(n) if n.isdecimal() and len(n) < 19 else -1 for n in corner.split(","))
    fits = first >= 0 and data + last <= size and last - first == prod(shape) * dtype.itemsize
    axes = len(shape)
    if not name or not fits or axes not in (1, 2) or axes != len(start) or min(shape + start) < 0:
        raise ValueError(f"{shown(key)} is no piece")
    box = whole(shape).moved(start[0], start[1] if axes == 2 else 0)
    return slot, name, StoredPiece(file, data + first, dtype, box, axes)
