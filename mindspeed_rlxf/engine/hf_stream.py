"""The weights of a role as whole Hugging Face tensors, one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.models.parameters import hf_shape, rank_parameters, stage_parameters
from mindspeed_rlxf.weights.stage import StageWeights


def hf_tensors(
    weights: StageWeights, groups: ParallelGroups, chunks: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight as (Hugging Face name, whole tensor on the device), on every rank.

    In the order of `hf_shapes`, whatever the layout. A collective: all ranks of the role must
    iterate to the same tensor. A tied output layer is left out, as in Hugging Face's files.
    """
    architecture, pp, ep = weights.architecture, groups.pp, groups.ep
    dtype = next(iter(weights.tensors.values())).dtype
    held = {p.sources: p for p in weights.table if not p.is_tied_output_layer}
    owners = {
        p.sources: (pp_rank, ep_rank)
        for pp_rank in range(pp.size())
        for ep_rank in range(ep.size())
        for p in rank_parameters(
            architecture, weights.head, pp_rank, pp.size(), chunks, ep_rank, ep.size()
        )
        if p.is_first_copy(0, ep_rank)
    }
    for parameter in stage_parameters(architecture, weights.head):
        (pp_rank, ep_rank), is_expert = owners[parameter.sources], parameter.expert is not None
        if parameter.sources in held:
            whole = weights.hf_tensors(held[parameter.sources])
        else:  # to receive a broadcast
            where = device.current_device()
            whole = {
                name: torch.empty(hf_shape(name, architecture), dtype=dtype, device=where)
                for name in parameter.sources
            }
        for tensor in whole.values():
            if pp.size() > 1 and (not is_expert or ep_rank == ep.rank()):
                dist.broadcast(tensor, dist.get_global_rank(pp, pp_rank), group=pp)
            if ep.size() > 1 and is_expert:
                dist.broadcast(tensor, dist.get_global_rank(ep, ep_rank), group=ep)
        yield from whole.items()
