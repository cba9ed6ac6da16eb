"""What the token dispatcher of Megatron's experts asks of collectives and gloo does not take.

NCCL and HCCL gather and scatter parts of different sizes; gloo wants equal ones. Calls that gloo
can do go to gloo unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def apply() -> None:
    """Wrap the three collectives; `torch.distributed` is where Megatron looks them up."""
    dist.all_to_all_single = _with_listed_sizes(dist.all_to_all_single)
    dist.all_gather = _uneven_all_gather(dist.all_gather)
    dist.reduce_scatter = _uneven_reduce_scatter(dist.reduce_scatter)


def _with_listed_sizes(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """The dispatcher copies split sizes from the device into an array; those that are on the CPU
    already it leaves a tensor, which no backend takes."""

    @functools.wraps(exchange)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), Tensor):
                kwargs[name] = kwargs[name].tolist()
        return exchange(*args, **kwargs)

    return wrapper


def _uneven(parts: list[Tensor]) -> bool:
    return len({part.shape for part in parts}) > 1


def _uneven_all_gather(gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gather)
    def wrapper(parts: list[Tensor], mine: Tensor, group: Any = None, **kwargs: Any) -> Any:
        if not _uneven(parts):
            return gather(parts, mine, group=group, **kwargs)
        assert not kwargs.get("async_op"), "parts of several sizes are gathered at once"
        parts[dist.get_rank(group)].copy_(mine)
        for rank, part in enumerate(parts):
            dist.broadcast(part, group=group, group_src=rank)
        return None

    return wrapper


def _uneven_reduce_scatter(scatter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scatter)
    def wrapper(mine: Tensor, parts: list[Tensor], group: Any = None, **kwargs: Any) -> Any:
        if not _uneven(parts):
            try:
                return scatter(mine, parts, group=group, **kwargs)
            except RuntimeError as error:  # gloo of torch 2.7 has none
                if "does not support reduce_scatter" not in str(error):
                    raise
        assert not kwargs.get("async_op"), "parts are summed and scattered at once"
        assert kwargs.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM, "they are summed up"
        whole = torch.cat(parts)
        dist.all_reduce(whole, group=group)
        mine.copy_(whole.split([len(part) for part in parts])[dist.get_rank(group)])
        return None

    return wrapper
