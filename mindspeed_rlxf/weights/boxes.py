"""Boxes: hyperrectangles of a tensor's elements, which ranks have in memory and files store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import add, mul, sub
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    OUTPUT_LAYER,
    RM_HEAD,
    SCORE_HEAD,
    Split,
    StageParameter,
    hf_shape,
    shard_shape,
    shard_slices,
)

Shape = tuple[int, ...]
COPY_BYTES = 1 << 24
MAX_PROBLEMS = 8  # of one folder: the first few tell which model it is
RM_HEAD_BIAS = "rm_head.bias"

IGNORED = re.compile(r"_extra_state|rotary_pos_emb\.inv_freq$|rotary_emb\.inv_freq$")
"""Names of what is stored beside the weights."""

Wrote = Callable[[int], None]
"""Called with the number of bytes of each tensor that is written."""


@dataclass(frozen=True)
class Box:
    """A range of indices of each axis of a tensor."""

    starts: Shape
    shape: Shape

    @property
    def stops(self) -> Shape:
        return tuple(map(add, self.starts, self.shape))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.starts, self.stops))

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection of two boxes of one tensor; None if it is empty."""
        starts = tuple(map(max, self.starts, other.starts))
        shape = tuple(map(sub, map(min, self.stops, other.stops), starts))
        return Box(starts, shape) if all(size > 0 for size in shape) else None

    def shift(self, steps: Shape) -> Box:
        return Box(tuple(map(add, self.starts, steps)), self.shape)

    def relative_to(self, outer: Box) -> Box:
        """Return this box with its starts counted from the first corner of `outer`."""
        return Box(tuple(map(sub, self.starts, outer.starts)), self.shape)

    def split(self, numel: int) -> Iterator[Box]:
        """Yield boxes of whole rows of the first axis, of `numel` elements at most, or one row."""
        first, rows, rest = self.starts[0], self.shape[0], self.shape[1:]
        step = max(1, numel // max(1, prod(rest)))
        for row in range(0, rows, step):
            yield Box((first + row, *self.starts[1:]), (min(step, rows - row), *rest))


def whole(shape: Shape) -> Box:
    """Return the box that covers a tensor of this shape."""
    return Box((0,) * len(shape), shape)


def box_of(dim: int, start: int, size: int, shape: Shape) -> Box:
    """Return the box of a tensor with the indices from `start` to `start + size` in axis `dim`."""
    starts, sizes = [0] * len(shape), list(shape)
    starts[dim], sizes[dim] = start, size
    return Box(tuple(starts), tuple(sizes))


def flat_boxes(flat: range, shape: Shape) -> Iterator[Box]:
    """Yield the boxes of a range of flat indices of a row-major tensor of one or two axes.

    At most three: the end of a row, whole rows, the start of a row.
    """
    assert 1 <= len(shape) <= 2, f"a parameter has one axis or two, not {shape}"
    start, stop, width = flat.start, flat.stop, shape[-1]
    while start < stop:
        row, left = divmod(start, width)
        rows = (stop - start) // width if left == 0 else 0
        columns = width if rows else min(width - left, stop - start)
        box = Box((row, left), (rows or 1, columns))
        yield box if len(shape) == 2 else Box((left,), (columns,))
        start += box.numel


def view_box(numbers: Tensor, start: int, box: Box, shape: Shape) -> Tensor:
    """Return a box of a row-major tensor of this shape as a view of `numbers`.

    `numbers` are contiguous elements of it, the first of which has the flat index `start`.
    """
    stride = (*shape[1:], 1)
    offset = numbers.storage_offset() - start + sum(map(mul, box.starts, stride))
    return numbers.as_strided(box.shape, stride, offset)


@dataclass(frozen=True)
class ShardBox:
    """A box of a Hugging Face tensor, and the box of a rank's parameter with the same elements."""

    source: str  # name of the Hugging Face tensor
    box: Box
    place: Box  # in the parameter

    def to_source(self, place: Box) -> Box:
        """Translate a box of the parameter, inside `self.place`, to the box of the source."""
        return place.relative_to(self.place).shift(self.box.starts)


def shard_boxes(
    parameter: StageParameter,
    architecture: ArchitectureConfig,
    tp_rank: int,
    tp: int,
    vocab_rows: int | None = None,
) -> Iterator[ShardBox]:
    """Yield the boxes of Hugging Face tensors that make up a tensor-parallel rank's shard.

    Rows that pad the vocabulary are in no box. `vocab_rows` of the embedding are on each rank; None
    = the padded vocabulary / tp.
    """
    offset = 0
    for part in shard_slices(parameter, architecture, tp_rank, tp, vocab_rows):
        if part.size:
            shape = hf_shape(part.source, architecture)
            box = box_of(part.dim, part.start, part.size, shape)
            yield ShardBox(part.source, box, box_of(part.dim, offset, part.size, shape))
            offset += part.size


@dataclass(frozen=True)
class HeldBox:
    """A box of a Hugging Face tensor, with its elements in memory."""

    slot: str  # "weight", or the name of an optimizer state of the tensor (such as "exp_avg")
    name: str
    box: Box
    tensor: Tensor


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor in a file; `read` returns a copy of a box inside it."""

    box: Box
    read: Callable[[Box], Tensor]


@dataclass(frozen=True)
class BoxedTensor:
    """A tensor that is stored as boxes, of which boxes are read as copies."""

    name: str  # for messages
    dtype: torch.dtype
    size: Shape  # of the stored tensor
    boxes: list[StoredBox]
    index: Shape = ()  # leading indices, if this is the sub-tensor stored[index] only

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> BoxedTensor:
        box = whole(tuple(tensor.shape))
        stored = StoredBox(box, lambda wanted: tensor[wanted.slices].clone())
        return cls(name, tensor.dtype, box.shape, [stored])

    @property
    def shape(self) -> Shape:
        return self.size[len(self.index) :]

    def read(self, box: Box) -> Tensor:
        """Return a copy of a box of the (sub-)tensor, joined from the stored boxes.

        Raises ValueError if they do not cover it.
        """
        wanted = Box(self.index + box.starts, (1,) * len(self.index) + box.shape)
        result = torch.zeros(wanted.shape, dtype=self.dtype)
        filled = 0
        for stored in self.boxes:
            shared = wanted.overlap(stored.box)
            if shared == wanted:
                return stored.read(shared).view(box.shape)
            if shared is not None:
                result[shared.relative_to(wanted).slices] = stored.read(shared)
                filled += shared.numel
        if filled != box.numel:
            raise ValueError(
                f"{self.name} must be whole, {filled} of the {box.numel} numbers of {box} are "
                "there; copy the whole folder again"
            )
        return result.view(box.shape)


class BoxedWeights(dict[str, BoxedTensor]):
    """Tensors by their Hugging Face names, from which boxes are read when they are needed."""

    def shape(self, name: str) -> Shape:
        return self[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self[name].dtype

    def read(self, name: str, box: Box) -> Tensor:
        return self[name].read(box)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that is made when it is written, and dropped after that."""

    shape: Shape
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> PlannedTensor:
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def parts(self) -> Iterator[memoryview]:
        """Make the tensor, which must be on the CPU; yield its bytes in parts of COPY_BYTES."""
        tensor = self.make()
        assert tensor.shape == self.shape and tensor.dtype == self.dtype, (
            f"planned {self.shape} {self.dtype}, got {tensor.shape} {tensor.dtype}"
        )
        data: Any = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for start in range(0, len(data), COPY_BYTES):
            yield data[start : start + COPY_BYTES]


@dataclass(frozen=True)
class PlannedFile:
    """A file of a converted folder."""

    path: str  # relative to the folder
    num_bytes: int  # of its tensors
    write: Callable[..., Any]  # write(path, wrote=...) returns the entries for the metadata


MakeShard = Callable[[StageParameter, int], PlannedTensor]
"""(parameter, tensor-parallel rank) -> that rank's part of it."""


class MegatronWeights(BoxedWeights):
    """The weights of a Megatron checkpoint, by Hugging Face names; fill it with `add_shard`."""

    def __init__(self, folder: Path, architecture: ArchitectureConfig) -> None:
        super().__init__()
        self.folder, self.architecture = folder, architecture
        self.dropped_bias: float | None = None  # of a reward head: Hugging Face has none

    def add_shard(
        self,
        parameter: StageParameter,
        found: tuple[str, BoxedTensor] | None,
        tp_rank: int,
        tp: int,
        ep_rank: int = 0,
    ) -> list[str]:
        """Check a rank's shard of a parameter; add it unless it is a copy of another rank's.

        `found` is its (name in the checkpoint, tensor), None if the rank has none. Returns [], or a
        list with the first problem, and then adds nothing.
        """
        if found is None:
            # A checkpoint has one of the heads or none; what needs a head reports its absence.
            is_head = parameter.name in (OUTPUT_LAYER.name, RM_HEAD.name)
            return [] if is_head else [f"{parameter.name} is missing"]
        a, (name, stored) = self.architecture, found
        rows = sum(stored.shape[:1]) if parameter.split is Split.VOCAB else None
        if rows is not None and rows * tp < a.vocab_size:
            return [f"{name} has {rows * tp} rows, the model needs {a.vocab_size}"]
        expected = shard_shape(parameter, a, tp, rows)
        if not stored.dtype.is_floating_point:
            return [f"{name} is {stored.dtype}, the model needs floating-point numbers"]
        if stored.shape != expected:
            return [f"{name} is {list(stored.shape)}, the model needs {list(expected)}"]
        if parameter.is_first_copy(tp_rank, ep_rank):
            for place in shard_boxes(parameter, a, tp_rank, tp, rows):
                source = place.source
                if source not in self:
                    where, shape = f"{source} in {self.folder}", hf_shape(source, a)
                    self[source] = BoxedTensor(where, stored.dtype, shape, [])
                self[source].boxes.append(StoredBox(place.box, partial(_read_shard, stored, place)))
        return []

    def note_bias(self, stored: BoxedTensor | None) -> None:
        """Read the bias of a reward head into `dropped_bias`, if it has the shape [1]."""
        if stored is not None and stored.shape == (1,):
            self.dropped_bias = float(stored.read(whole((1,))))


def _read_shard(stored: BoxedTensor, place: ShardBox, box: Box) -> Tensor:
    return stored.read(box.relative_to(place.box).shift(place.place.starts))


def spellings(name: str) -> list[str]:
    """List the names under which checkpoints may store a parameter, its own first.

    Transformer Engine, and sharded checkpoints, name a norm after the linear layer behind it.
    """
    fused = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    if name == RM_HEAD.name:
        return [name, SCORE_HEAD.name]
    for ours, theirs in fused.items():
        if name.endswith(ours):
            return [name, name.removesuffix(ours) + theirs]
    return [name]


def find(
    parameter: StageParameter, tensors: Mapping[str, BoxedTensor]
) -> tuple[str, BoxedTensor] | None:
    """Return (name under which a parameter is stored, its tensor), or None."""
    return next(((n, tensors[n]) for n in spellings(parameter.name) if n in tensors), None)


def unknown_names(names: Iterable[str], used: set[str]) -> list[str]:
    """Return the names, sorted, that are neither in `used` nor expected beside the weights."""
    known = used | {RM_HEAD_BIAS, OUTPUT_LAYER.name}
    return sorted(name for name in names if name not in known and not IGNORED.search(name))


def refuse(folder: Path, problems: list[str]) -> None:
    """Raise a ValueError with the first MAX_PROBLEMS of a folder of weights, if there are any."""
    if problems:
        more = len(problems) - MAX_PROBLEMS
        shown = problems[:MAX_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        raise ValueError(
            f"{folder} holds another model than config.json describes: {'; '.join(shown)}; give "
            "the config.json of that model"
        )
