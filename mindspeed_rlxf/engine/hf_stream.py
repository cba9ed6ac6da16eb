"""The weights of a role as whole Hugging Face tensors, one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.models.parameters import hf_shape, rank_parameters
from mindspeed_rlxf.weights.stage import StageWeights


def hf_tensors(
    weights: StageWeights, groups: ParallelGroups, chunks: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight as (Hugging Face name, whole tensor on the device), on every rank.

    Ordered by pipeline stage, then by expert-parallel rank. A collective: all ranks of the role
    must iterate to the same tensor. Memory for two copies of one parameter is needed beside the
    model. A tied output layer is left out, as in Hugging Face's files.
    """
    architecture, pp, ep = weights.architecture, groups.pp, groups.ep
    dtype = next(iter(weights.tensors.values())).dtype
    for stage in range(pp.size()):
        for ep_rank in range(ep.size()):
            owner = stage, pp.size(), chunks, ep_rank, ep.size()
            for parameter in rank_parameters(architecture, weights.head, *owner):
                if not parameter.is_first_copy(0, ep_rank):
                    continue
                held = stage == pp.rank() and (parameter.expert is None or ep_rank == ep.rank())
                if held:
                    whole = weights.hf_tensors(parameter)
                else:  # to receive a broadcast
                    where = device.current_device()
                    whole = {
                        name: torch.empty(hf_shape(name, architecture), dtype=dtype, device=where)
                        for name in parameter.sources
                    }
                for tensor in whole.values():
                    if pp.size() > 1 and (parameter.expert is None or ep_rank == ep.rank()):
                        dist.broadcast(tensor, dist.get_global_rank(pp, stage), group=pp)
                    if ep.size() > 1 and parameter.expert is not None:
                        dist.broadcast(tensor, dist.get_global_rank(ep, ep_rank), group=ep)
                yield from whole.items()
