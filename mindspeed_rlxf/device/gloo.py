"""Adapt gloo to Megatron: tensors of different sizes, and one device for all groups of a process.

The token dispatcher of experts gathers and scatters tensors of different sizes. NCCL and HCCL can
do that; gloo needs equal sizes. Calls that gloo supports go to gloo unchanged.

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
    """Replace three functions of `torch.distributed` for all callers; call it once."""
    dist.all_to_all_single = _with_listed_sizes(dist.all_to_all_single)
    dist.all_gather = _uneven_all_gather(dist.all_gather)
    dist.reduce_scatter = _uneven_reduce_scatter(dist.reduce_scatter)


def _with_listed_sizes(exchange: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(exchange)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), Tensor):
                kwargs[name] = kwargs[name].tolist()
        return exchange(*args, **kwargs)

    return wrapper


def _uneven_all_gather(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Return `gather` (all_gather) wrapped to accept outputs of different shapes."""

    @functools.wraps(gather)
    def wrapper(outputs: list[Tensor], own: Tensor, group: Any = None, **kwargs: Any) -> Any:
        if len({output.shape for output in outputs}) <= 1:
            return gather(outputs, own, group=group, **kwargs)
        assert not kwargs.get("async_op"), "tensors of several shapes are gathered synchronously"
        outputs[dist.get_rank(group)].copy_(own)
        for rank, output in enumerate(outputs):
            dist.broadcast(output, group=group, group_src=rank)
        return None

    return wrapper


def _uneven_reduce_scatter(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Return `scatter` (reduce_scatter) wrapped to accept inputs of different first dimensions.

    These are summed with one all_reduce, of which each rank copies its own slice into the output;
    the wrapper then returns None, and asserts a synchronous sum. Inputs of equal shape go to
    `scatter`, unless this version of gloo has no reduce_scatter.
    """

    @functools.wraps(scatter)
    def wrapper(output: Tensor, inputs: list[Tensor], group: Any = None, **kwargs: Any) -> Any:
        if len({each.shape for each in inputs}) <= 1:
            try:
                return scatter(output, inputs, group=group, **kwargs)
            except RuntimeError as error:  # gloo of torch 2.7 has none
                if "does not support reduce_scatter" not in str(error):
                    raise
        assert not kwargs.get("async_op"), "inputs are summed and scattered synchronously"
        assert kwargs.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM, "only sums are supported"
        whole = torch.cat(inputs)
        dist.all_reduce(whole, group=group)
        output.copy_(whole.split([len(each) for each in inputs])[dist.get_rank(group)])
        return None

    return wrapper


def share_device() -> None:
    """Patch `ProcessGroupGloo` so that groups made from now on share this process's gloo devices.

    A second call changes nothing.
    """
    gloo: Any = dist.ProcessGroupGloo
    make = gloo.__init__
    if getattr(make, "shares_devices", False):
        return

    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = gloo._Options()
        options._timeout, options._devices = timeout, _make_devices()
        options._threads = 2 * len(options._devices)  # as torch does
        make(self, store, rank, size, options)

    init.shares_devices = True  # type: ignore[attr-defined]
    gloo.__init__ = init


@functools.cache
def _make_devices() -> list[Any]:
    """Make the gloo devices that torch would: those of GLOO_SOCKET_IFNAME, or the default."""
    gloo: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
