"""Boxes: hyperrectangles of a tensor's elements, which ranks have in memory and files store.

A `Box` is a range of indices of each axis, a `StoredBox` can read a box from a file, a
`BoxedTensor` is a tensor made of stored boxes, and `BoxedWeights` are such tensors by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from operator import add, mul, sub

import torch
from torch import Tensor

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import StageParameter, hf_shape, shard_slices

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A range of indices of each axis of a tensor. starts: first index; shape: number of indices"""

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
        """Return the index that selects the box in the tensor."""
        return tuple(map(slice, self.starts, self.stops))

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection of two boxes of one tensor; None where it is empty."""
        starts = tuple(map(max, self.starts, other.starts))
        shape = tuple(map(sub, map(min, self.stops, other.stops), starts))
        return Box(starts, shape) if all(size > 0 for size in shape) else None

    def shift(self, steps: Shape) -> Box:
        return Box(tuple(map(add, self.starts, steps)), self.shape)

    def relative_to(self, outer: Box) -> Box:
        """Return this box with its starts counted from the first corner of `outer`."""
        return Box(tuple(map(sub, self.starts, outer.starts)), self.shape)

    def split(self, numel: int) -> Iterator[Box]:
        """Yield boxes of whole rows of the first axis: at most `numel` elements each, or one row.

        None for no rows. The box has one axis at least.
        """
        first, rows, rest = self.starts[0], self.shape[0], self.shape[1:]
        step = max(1, numel // max(1, prod(rest)))
        for row in range(0, rows, step):
            yield Box((first + row, *self.starts[1:]), (min(step, rows - row), *rest))


def whole(shape: Shape) -> Box:
    """Return the box that covers a tensor of this shape."""
    return Box((0,) * len(shape), shape)


def box_of(dim: int, start: int, size: int, shape: Shape) -> Box:
    """Return the box with `size` indices from `start` on in axis `dim`, and all of the other axes.

    shape: shape of the whole tensor
    """
    starts, sizes = [0] * len(shape), list(shape)
    starts[dim], sizes[dim] = start, size
    return Box(tuple(starts), tuple(sizes))


def flat_boxes(flat: range, shape: Shape) -> Iterator[Box]:
    """Yield boxes that together are a range of flat indices of a row-major tensor, in order.

    shape: of the tensor, one or two axes (AssertionError for others). There are at most three
    boxes: the end of a row, whole rows, the start of a row.
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
    """Return a box of a row-major tensor as a view of `numbers`, without a copy.

    numbers: contiguous elements of the tensor, of which the first has the flat index `start`
    shape:   of the tensor
    """
    stride = (*shape[1:], 1)
    offset = numbers.storage_offset() - start + sum(map(mul, box.starts, stride))
    return numbers.as_strided(box.shape, stride, offset)


@dataclass(frozen=True)
class ShardBox:
    """A box of a Hugging Face tensor, and the box of a rank's parameter with the same elements.

    source: name of the Hugging Face tensor; box: in that tensor; place: box in the parameter
    """

    source: str
    box: Box
    place: Box

    def to_source(self, place: Box) -> Box:
        """Translate a box of the parameter, inside `self.place`, to the box of the source."""
        return place.relative_to(self.place).shift(self.box.starts)

    def to_shard(self, box: Box) -> Box:
        """Translate a box of the source tensor, inside `self.box`, to the box of the parameter."""
        return box.relative_to(self.box).shift(self.place.starts)


def shard_boxes(
    parameter: StageParameter,
    architecture: ArchitectureConfig,
    tp_rank: int,
    tp: int,
    vocab_rows: int | None = None,
) -> Iterator[ShardBox]:
    """Yield the boxes of Hugging Face tensors that make up a tensor-parallel rank's shard.

    Each has its box in the source and its place in the shard, in the order of `shard_slices`. Rows
    that pad the vocabulary are in no box, and empty boxes are left out.
    vocab_rows: rows of the embedding on each rank; None = the padded vocabulary / tp
    """
    offset, shapes = 0, {name: hf_shape(name, architecture) for name in parameter.sources}
    for part in shard_slices(parameter, architecture, tp_rank, tp, vocab_rows):
        if part.size:
            shape = shapes[part.source]
            box = box_of(part.dim, part.start, part.size, shape)
            yield ShardBox(part.source, box, box_of(part.dim, offset, part.size, shape))
            offset += part.size


@dataclass(frozen=True)
class HeldBox:
    """A box of a Hugging Face tensor, with its elements in memory.

    slot:   "weight", or the name of an optimizer state of the tensor (such as "exp_avg")
    tensor: elements, of the shape of the box
    """

    slot: str
    name: str
    box: Box
    tensor: Tensor


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor in a file. read: function that returns a copy of a box inside this one"""

    box: Box
    read: Callable[[Box], Tensor]


@dataclass(frozen=True)
class BoxedTensor:
    """A tensor that is stored as boxes, of which boxes are read as copies.

    name:  for messages
    size:  shape of the stored tensor
    index: leading indices, if this is the sub-tensor stored[index] only
    """

    name: str
    dtype: torch.dtype
    size: Shape
    boxes: list[StoredBox]
    index: Shape = ()

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> BoxedTensor:
        """Wrap a tensor, such as one that is mapped from a file."""
        box = whole(tuple(tensor.shape))
        stored = StoredBox(box, lambda wanted: tensor[wanted.slices].clone())
        return cls(name, tensor.dtype, box.shape, [stored])

    @property
    def shape(self) -> Shape:
        return self.size[len(self.index) :]

    def read(self, box: Box) -> Tensor:
        """Return a copy of a box, put together from the stored boxes that overlap it.

        If `index` is not empty, `box` is one of the sub-tensor at that index of the stored tensor.
        Raises ValueError where the stored boxes do not cover it. Only elements are counted: boxes
        that overlap are not noticed.
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


class BoxedWeights:
    """Tensors by their Hugging Face names, from which boxes are read when they are needed."""

    def __init__(self) -> None:
        self.tensors: dict[str, BoxedTensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> BoxedTensor:
        return self.tensors[name]

    def shape(self, name: str) -> Shape:
        return self.tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.tensor(name).dtype

    def read(self, name: str, box: Box) -> Tensor:
        return self.tensor(name).read(box)
