"""Adapt gloo to Megatron: parts of different sizes, and one device for all groups of a process.

The token dispatcher of experts gathers and scatters parts of different sizes. NCCL and HCCL can do
that; gloo needs equal sizes. Calls that gloo supports go to gloo unchanged.

torch gives each group its own gloo device, with a thread that polls its sockets a hundred times a
second. Megatron makes a hundred groups for a role, so that even waiting ranks keep a host busy.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def wrap_collectives() -> None:
    """Wrap three collectives in `torch.distributed`, where Megatron looks them up.

    all_to_all_single then takes sizes as tensors too, all_gather and reduce_scatter take parts of
    different sizes.
    """
    dist.all_to_all_single = _with_listed_sizes(dist.all_to_all_single)
    dist.all_gather = _uneven_all_gather(dist.all_gather)
    dist.reduce_scatter = _uneven_reduce_scatter(dist.reduce_scatter)


def _with_listed_sizes(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective so that it also takes split sizes as tensors.

    The dispatcher converts sizes on the device to lists, but leaves sizes on the CPU as tensors.
    """

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
    """Wrap all_gather so that parts of different sizes are broadcast rank by rank."""

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
    """Wrap reduce_scatter so that parts of different sizes are summed whole, then cut.

    Also used where gloo has no reduce_scatter.
    """

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


def share_device() -> None:
    """Replace gloo's constructor, so that groups made later share the process's gloo devices."""
    gloo: Any = dist.ProcessGroupGloo
    make = gloo.__init__
    if getattr(make, "shares_devices", False):
        return

    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = gloo._Options()
        options._timeout, options._devices = timeout, _devices()
        options._threads = 2 * len(options._devices)  # as torch does
        make(self, store, rank, size, options)

    init.shares_devices = True  # type: ignore[attr-defined]
    gloo.__init__ = init


@functools.cache
def _devices() -> list[Any]:
    """Make the gloo devices that torch would: those of GLOO_SOCKET_IFNAME, or the default one."""
    gloo: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    made = [gloo.create_device(interface=name) for name in names]
    return made or [gloo.create_default_device()]
