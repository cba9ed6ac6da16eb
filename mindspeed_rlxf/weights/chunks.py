"""Tensor chunks (rectangular index ranges), in memory or stored in files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
MAX_PROBLEMS = 8  # of one folder: the first few tell which model it is
RM_HEAD_BIAS = "rm_head.bias"

IGNORED = re.compile(r"_extra_state|rotary_pos_emb\.inv_freq$|rotary_emb\.inv_freq$")
"""Names of what is stored beside the weights."""

Wrote = Callable[[int], None]
"""Called with the number of bytes of each tensor that is written."""


@dataclass(frozen=True)
class Chunk:
    """An index range per axis."""

    starts: Shape
    shape: Shape

    @property
    def stops(self) -> Shape:
        """End index per axis."""
        return tuple(map(add, self.starts, self.shape))

    @property
    def numel(self) -> int:
        """Element count."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The chunk as an index for tensors."""
        return tuple(map(slice, self.starts, self.stops))

    def narrow(self, dim: int, start: int, size: int) -> Chunk:
        """Restrict one axis to `size` indices from `start`, counted within the chunk."""
        starts = list(self.starts)
        shape = list(self.shape)
        starts[dim] += start
        shape[dim] = size
        return Chunk(tuple(starts), tuple(shape))

    def overlap(self, other: Chunk) -> Chunk | None:
        """Return the intersection with another chunk, or None if empty."""
        starts = tuple(map(max, self.starts, other.starts))
        shape = tuple(map(sub, map(min, self.stops, other.stops), starts))
        return Chunk(starts, shape) if all(size > 0 for size in shape) else None

    def move(self, outer: Chunk, target: Chunk) -> Chunk:
        """Translate the chunk from `outer`, which contains it, to the same part in `target`."""
        steps = map(sub, target.starts, outer.starts)
        return Chunk(tuple(map(add, self.starts, steps)), self.shape)

    def relative_to(self, outer: Chunk) -> Chunk:
        """Return the chunk with its starts counted from those in `outer`."""
        return self.move(outer, whole(outer.shape))

    def split(self, numel: int) -> Iterator[Chunk]:
        """Yield chunks with whole rows: at most `numel` elements, or one row."""
        rows = max(1, numel // max(1, prod(self.shape[1:])))
        for row in range(0, self.shape[0], rows):
            yield self.narrow(0, row, min(rows, self.shape[0] - row))


def whole(shape: Shape) -> Chunk:
    """Return the chunk covering a tensor with this shape."""
    return Chunk((0,) * len(shape), shape)


def flat_chunks(flat: range, shape: Shape) -> Iterator[Chunk]:
    """Yield the chunks covering a flat index range in a row-major tensor with one or two axes.

    At most three: a row's end, whole rows, a row's start.
    """
    assert 1 <= len(shape) <= 2, f"a parameter has one axis or two, not {shape}"
    start = flat.start
    width = shape[-1]
    while start < flat.stop:
        row, column = divmod(start, width)
        num_left = flat.stop - start
        if column == 0 and num_left >= width:
            num_rows = num_left // width
            num_columns = width
        else:
            num_rows = 1
            num_columns = min(width - column, num_left)
        if len(shape) == 2:
            yield Chunk((row, column), (num_rows, num_columns))
        else:
            yield Chunk((column,), (num_columns,))
        start += num_rows * num_columns


def view_chunk(elements: Tensor, start: int, chunk: Chunk, shape: Shape) -> Tensor:
    """View a chunk of a larger row-major tensor with this shape.

    `elements` are contiguous elements in it, starting at the flat index `start`.
    """
    stride = (*shape[1:], 1)
    offset = elements.storage_offset() - start + sum(map(mul, chunk.starts, stride))
    return elements.as_strided(chunk.shape, stride, offset)


@dataclass(frozen=True)
class ShardChunk:
    """A Hugging Face tensor chunk, and its place in a rank's parameter."""

    source: str  # name of the Hugging Face tensor
    chunk: Chunk
    place: Chunk  # in the parameter


def shard_chunks(
    parameter: StageParameter,
    architecture: ArchitectureConfig,
    tp_rank: int,
    tp: int,
    vocab_rows: int | None = None,
) -> Iterator[ShardChunk]:
    """Yield the Hugging Face chunks making up a tensor-parallel rank's shard, without padding.

    `vocab_rows` are the embedding rows per rank; None = padded vocabulary / tp.
    """
    offset = 0
    for hf_slice in shard_slices(parameter, architecture, tp_rank, tp, vocab_rows):
        dim = hf_slice.dim
        size = hf_slice.size
        if size > 0:
            source = whole(parameter.hf_shape(hf_slice.source, architecture))
            chunk = source.narrow(dim, hf_slice.start, size)
            yield ShardChunk(hf_slice.source, chunk, source.narrow(dim, offset, size))
            offset += size


@dataclass(frozen=True)
class HeldChunk:
    """A Hugging Face tensor chunk, with its elements in memory."""

    state_name: str  # "weight", or that of an optimizer state of the tensor, as "exp_avg"
    name: str
    chunk: Chunk
    tensor: Tensor


@dataclass(frozen=True)
class StoredTensor:
    """A tensor stored as chunks; `read` copies any chunk."""

    name: str  # for messages
    dtype: torch.dtype
    size: Shape  # of the stored tensor
    # Each chunk, its place in what the third entry reads, a function that copies a part of that.
    chunks: list[tuple[Chunk, Chunk, Callable[[Chunk], Tensor]]]
    index: Shape = ()  # leading indices, if this is the sub-tensor stored[index] only

    @classmethod
    def of(cls, name: str, tensor: Any, dtype: torch.dtype, shape: Shape) -> StoredTensor:
        """Wrap a tensor, or anything returning tensors when sliced."""
        chunk = whole(shape)
        return cls(name, dtype, shape, [(chunk, chunk, lambda inner: tensor[inner.slices].clone())])

    @property
    def shape(self) -> Shape:
        """Shape without the leading indices."""
        return self.size[len(self.index) :]

    def read(self, chunk: Chunk) -> Tensor:
        """Return a copy of a chunk, joined from the stored chunks.

        Raises:
            ValueError: the stored chunks do not cover it.
        """
        requested = Chunk(self.index + chunk.starts, (1,) * len(self.index) + chunk.shape)
        joined = torch.zeros(requested.shape, dtype=self.dtype)
        num_read = 0
        for stored, place, read in self.chunks:
            overlap = requested.overlap(stored)
            if overlap is None:
                continue
            elements = read(overlap.move(stored, place))
            if overlap == requested:
                return elements.view(chunk.shape)
            joined[overlap.relative_to(requested).slices] = elements
            num_read += overlap.numel
        if num_read != chunk.numel:
            raise ValueError(
                f"{self.name} must be complete, {num_read} of {chunk.numel} elements of {chunk} "
                "are there; copy the whole folder again"
            )
        return joined.view(chunk.shape)


def is_full_precision(dtype: torch.dtype) -> bool:
    """Return whether elements are weights as they stand: floating point of at least 16 bits."""
    return dtype.is_floating_point and dtype.itemsize >= 2


StoredWeights = dict[str, StoredTensor]
"""Tensors by their Hugging Face names, from which chunks are read when they are needed."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor created when written, and dropped afterwards."""

    shape: Shape
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> PlannedTensor:
        """Plan an existing tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)


@dataclass(frozen=True)
class PlannedFile:
    """A file in a converted folder, or a folder with several."""

    path: str  # relative to the folder
    num_bytes: int  # of its tensors
    write: Callable[..., None]  # write(path, wrote=...)


MakeShard = Callable[[StageParameter, int], PlannedTensor]
"""(parameter, tensor-parallel rank) -> that rank's part of it."""


def add_rank(
    weights: StoredWeights,
    folder: Path,
    architecture: ArchitectureConfig,
    parameters: Iterable[StageParameter],
    tensors: StoredWeights,
    tp_rank: int = 0,
    tp: int = 1,
    ep_rank: int = 0,
) -> list[str]:
    """Add a rank's `tensors` from a Megatron checkpoint to `weights`, by Hugging Face names.

    `parameters` are the rank's possible ones, with any head; `folder` is for messages. An output
    layer is added where the model is tied too, to compare it with the embedding. Returns a line per
    missing, misshapen or unknown tensor.
    """
    problems = []
    used_names = set()
    of_model = [parameter for parameter in parameters if parameter.name != OUTPUT_LAYER.name]
    for parameter in (*of_model, OUTPUT_LAYER):
        name = next((name for name in spellings(parameter.name) if name in tensors), None)
        if name is None:
            # A checkpoint has one of the heads or none; what needs a head reports its absence.
            if parameter.name not in (OUTPUT_LAYER.name, RM_HEAD.name):
                problems.append(f"{parameter.name} is missing")
            continue
        used_names.add(name)
        stored = tensors[name]
        rows = sum(stored.shape[:1]) if parameter.split is Split.VOCAB else None
        expected = shard_shape(parameter, architecture, tp, rows)
        if rows is not None and rows * tp < architecture.vocab_size:
            problems.append(
                f"{name} has {rows * tp} rows, the model needs {architecture.vocab_size}"
            )
        elif not is_full_precision(stored.dtype):
            problems.append(f"{name} is {stored.dtype}, the model needs floats of 16 bits or more")
        elif stored.shape != expected:
            problems.append(f"{name} is {list(stored.shape)}, the model needs {list(expected)}")
        elif parameter.is_first_copy(tp_rank, ep_rank):
            for shard_chunk in shard_chunks(parameter, architecture, tp_rank, tp, rows):
                source = shard_chunk.source
                if source not in weights:
                    shape = hf_shape(source, architecture)
                    weights[source] = StoredTensor(f"{source} in {folder}", stored.dtype, shape, [])
                weights[source].chunks.append((shard_chunk.chunk, shard_chunk.place, stored.read))
    if RM_HEAD_BIAS in tensors:
        weights[RM_HEAD_BIAS] = tensors[RM_HEAD_BIAS]
    problems += [f"{name} is not in the model" for name in unknown_names(tensors, used_names)]
    return problems


def spellings(name: str) -> list[str]:
    """List a parameter's possible names in checkpoints, its own first.

    Transformer Engine and sharded checkpoints name a norm after the linear layer behind it.
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


def unknown_names(names: Iterable[str], used: set[str]) -> list[str]:
    """Return, sorted, the names neither in `used` nor expected beside the weights."""
    expected = used | {RM_HEAD_BIAS, OUTPUT_LAYER.name}
    return sorted(name for name in names if name not in expected and not IGNORED.search(name))


def refuse(folder: Path, problems: list[str]) -> None:
    """Raise a ValueError listing the first MAX_PROBLEMS problems, if there are any."""
    if not problems:
        return
    listed = problems[:MAX_PROBLEMS]
    num_unlisted = len(problems) - len(listed)
    if num_unlisted > 0:
        listed.append(f"and {num_unlisted} more")
    raise ValueError(
        f"{folder} holds another model than config.json describes: {'; '.join(listed)}; give "
        "the config.json of that model"
    )
