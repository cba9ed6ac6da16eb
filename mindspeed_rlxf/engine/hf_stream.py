"""A role's weights as whole Hugging Face tensors, one parameter at a time."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.models.parameters import StageParameter, rank_parameters, stage_parameters
from mindspeed_rlxf.weights.chunks import (
    HeldChunk,
    ShardChunk,
    flat_chunks,
    shard_chunks,
    view_chunk,
)
from mindspeed_rlxf.weights.stage_loader import StageWeights


def hf_tensors(
    weights: StageWeights, groups: ParallelGroups, chunks: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight as (Hugging Face name, whole device tensor), on every rank.

    Adapters are not merged into them. The order is that of `hf_shapes`, whatever the layout. A
    collective: all ranks in the role must iterate to the same tensor. Omits a tied output layer, as
    Hugging Face files do.
    """
    yield from _stream(weights, groups, chunks, lambda table: table)


def adapter_tensors(
    weights: StageWeights, groups: ParallelGroups, chunks: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield each adapter's A and B like `hf_tensors`, in the order of `adapter_shapes`."""
    yield from _stream(weights, groups, chunks, weights.adapters_of)


def trained_tensors(
    weights: StageWeights, groups: ParallelGroups, chunks: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that training changes like `hf_tensors`: adapters apart from weights."""
    yield from _stream(weights, groups, chunks, weights.trained_of)


def _stream(
    weights: StageWeights,
    groups: ParallelGroups,
    chunks: int,
    choose: Callable[[list[StageParameter]], list[StageParameter]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of each parameter chosen among a table's, gathered by its owners.

    choose: called with the parameters of a rank, and of the whole model.
    """
    architecture = weights.architecture
    head = weights.head
    pp = groups.pp
    ep = groups.ep
    dtype = next(iter(weights.tensors.values())).dtype
    on_this_rank = {p.sources: p for p in choose(weights.table) if not p.is_tied_output_layer}
    owners: dict[tuple[str, ...], tuple[int, int]] = {}  # sources -> (pp, ep) rank
    for pp_rank, ep_rank in itertools.product(range(pp.size()), range(ep.size())):
        table = list(
            rank_parameters(architecture, head, pp_rank, pp.size(), chunks, ep_rank, ep.size())
        )
        for parameter in choose(table):
            if parameter.is_first_copy(0, ep_rank):
                owners[parameter.sources] = (pp_rank, ep_rank)
    for parameter in choose(list(stage_parameters(architecture, head))):
        pp_rank, ep_rank = owners[parameter.sources]
        is_expert = parameter.expert is not None
        if parameter.sources in on_this_rank:
            tensors = weights.gather(on_this_rank[parameter.sources])
        else:  # to receive a broadcast
            tensors = {}
            for name in parameter.sources:
                shape = parameter.hf_shape(name, architecture)
                tensors[name] = torch.empty(shape, dtype=dtype, device=device.current_device())
        for tensor in tensors.values():
            if pp.size() > 1 and (not is_expert or ep_rank == ep.rank()):
                dist.broadcast(tensor, dist.get_global_rank(pp, pp_rank), group=pp)
            if ep.size() > 1 and is_expert:
                dist.broadcast(tensor, dist.get_global_rank(ep, ep_rank), group=ep)
        yield from tensors.items()


@dataclass(frozen=True)
class Shard:
    """A parameter of this rank.

    chunks:     the chunks of Hugging Face tensors that it consists of
    is_written: this rank or a replica writes the shard; False = another tensor-parallel rank with
                the same elements does
    written:    range of flattened elements that this rank writes; empty if not `is_written`
    """

    parameter: Tensor
    chunks: tuple[ShardChunk, ...]
    is_written: bool
    written: range

    def held_chunks(self, state_name: str, tensor: Tensor, flat: range) -> Iterator[HeldChunk]:
        """Yield views of `tensor`, one per chunk of a Hugging Face tensor that the range covers.

        Elements that pad the vocabulary are in no chunk.
        flat:   a range of flattened elements of the shard
        tensor: the elements of that range, contiguous
        """
        shape = tuple(self.parameter.shape)
        for rows in flat_chunks(flat, shape):
            for chunk in self.chunks:
                overlap = rows.overlap(chunk.place)
                if overlap is not None:
                    elements = view_chunk(tensor, flat.start, overlap, shape)
                    in_source = overlap.move(chunk.place, chunk.chunk)
                    yield HeldChunk(state_name, chunk.source, in_source, elements)


def shards(weights: StageWeights, groups: ParallelGroups) -> Iterator[Shard]:
    """Yield the shard of every trained parameter of this rank, with the range this replica writes.

    The elements of these parameters, end to end in the order of the parameter map, are cut into
    equal ranges, one per copy. Experts have dp x cp / ep copies and are cut separately from the
    other parameters, which have dp x cp. The range is empty where another rank has the first copy
    of the shard.
    """
    rank = groups.dp_cp.rank()
    num_copies = groups.dp_cp.size()
    ep = groups.ep.size()
    tp_rank = groups.tp.rank()
    table = weights.trained_of(weights.table)
    totals = {False: 0, True: 0}  # is an expert -> elements
    for parameter in table:
        totals[parameter.expert is not None] += weights.tensors[parameter.name].numel()
    num_before = {False: 0, True: 0}  # is an expert -> elements of the parameters before
    for parameter in table:
        tensor = weights.tensors[parameter.name]
        is_expert = parameter.expert is not None
        replica = rank // ep if is_expert else rank
        num_replicas = num_copies // ep if is_expert else num_copies
        start = totals[is_expert] * replica // num_replicas - num_before[is_expert]
        stop = totals[is_expert] * (replica + 1) // num_replicas - num_before[is_expert]
        num_before[is_expert] += tensor.numel()
        written = range(max(0, start), max(0, min(stop, tensor.numel())))
        chunks = shard_chunks(parameter, weights.architecture, tp_rank, groups.tp.size())
        is_written = parameter.is_first_copy(tp_rank)
        yield Shard(tensor, tuple(chunks), is_written, written if is_written else range(0))
