"""Where the numbers of this rank's parameters lie in Hugging Face tensors, and who writes them.

A shard of a parameter is made of blocks, each a box of one Hugging Face tensor; rows that pad the
vocabulary belong to no block. Replicas hold the same shards: they share the work of writing them,
each a flat range of all numbers in the order of the parameters, so that all write as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.models.parameters import (
    EMBEDDING,
    OUTPUT_LAYER,
    Split,
    StageParameter,
    hf_shape,
    shard_slices,
)
from mindspeed_rlxf.weights.boxes import Box, flat_boxes, view, whole
from mindspeed_rlxf.weights.stage import StageWeights


@dataclass(frozen=True)
class Block:
    """A box of a Hugging Face tensor, and where in the shard it lies. axes: of that tensor"""

    source: str
    part: Box
    place: Box
    axes: int


@dataclass(frozen=True)
class Part:
    """A box of a Hugging Face tensor, and the numbers of a tensor of this rank that it is.

    tensor: [height, width], a view
    """

    source: str
    box: Box
    tensor: Tensor
    axes: int


@dataclass(frozen=True)
class Shard:
    """A parameter of this rank.

    is_written: by this rank and its replicas; False where other ranks write the same numbers
    written:    the flat range that this one of the replicas writes; empty where not `is_written`
    """

    parameter: Tensor
    blocks: tuple[Block, ...]
    is_written: bool
    written: range

    def parts(self, tensor: Tensor, flat: range) -> Iterator[Part]:
        """The boxes that a flat range of the shard is made of, in order.

        tensor: contiguous, the numbers of the range
        """
        width = whole(tuple(self.parameter.shape)).width
        for rows in flat_boxes(flat.start, flat.stop, width):
            for block in self.blocks:
                shared = rows.overlap(block.place)
                if shared is None:
                    continue
                down, right = block.part.top - block.place.top, block.part.left - block.place.left
                numbers = view(tensor, flat.start, shared, width)
                yield Part(block.source, shared.moved(down, right), numbers, block.axes)


def shards(weights: StageWeights, groups: ParallelGroups) -> Iterator[Shard]:
    """Every parameter of this rank, in the order of the map, which its replicas share.

    Experts are on dp / ep replicas, all else on dp.
    """
    dp, rank, ep = groups.dp.size(), groups.dp.rank(), groups.ep.size()
    counts = {False: 0, True: 0}  # numbers so far: of experts, of all else
    totals = dict(counts)
    for parameter in weights.table:
        totals[parameter.expert is not None] += weights.tensors[parameter.name].numel()
    for parameter in weights.table:
        tensor, expert = weights.tensors[parameter.name], parameter.expert is not None
        replica, replicas = (rank // ep, dp // ep) if expert else (rank, dp)
        first, total = counts[expert], totals[expert]
        counts[expert] += tensor.numel()
        start, stop = (total * n // replicas - first for n in (replica, replica + 1))
        mine = range(max(0, start), max(0, min(stop, tensor.numel())))
        is_written = _is_written(parameter, groups)
        blocks = tuple(_blocks(parameter, weights))
        yield Shard(tensor, blocks, is_written, mine if is_written else range(0))


def _is_written(parameter: StageParameter, groups: ParallelGroups) -> bool:
    """By this rank and its replicas: not what other tensor-parallel ranks hold too, nor the output
    layer of a last stage that is tied to the embedding of the first."""
    if parameter.name.endswith(OUTPUT_LAYER.name) and parameter.sources == EMBEDDING.sources:
        return False
    return parameter.split is not Split.REPLICATED or groups.tp.rank() == 0


def _blocks(parameter: StageParameter, weights: StageWeights) -> Iterator[Block]:
    a, tp = weights.architecture, weights.tp_group
    offset = 0
    for part in shard_slices(parameter, a, tp.rank(), tp.size()):
        shape = hf_shape(part.source, a)
        height, width = whole(shape).bottom, whole(shape).right
        if part.dim == 0:
            box = Box(part.start, part.stop, 0, width)
            place = box.moved(offset - part.start, 0)
        else:
            box = Box(0, height, part.start, part.stop)
            place = box.moved(0, offset - part.start)
        offset += part.size
        yield Block(part.source, box, place, len(shape))
