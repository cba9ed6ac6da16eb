"""Redirect the devices cuda and npu to the CPU, and the backends hccl and nccl to gloo.

On a real NPU the module of this name redirects cuda to npu. The CPU adaptor of the package does
most of the work here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch_npu._C import Options

from mindspeed_rlxf.device import cpu_adaptor

MORE_FACTORIES = ("eye", "randperm", "empty_strided", "linspace")
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")  # of Tensor
BACKENDS = ("hccl", "nccl")


def is_accelerator(device: Any) -> bool:
    """Whether a device, as torch.device or text, is cuda or npu."""
    if isinstance(device, torch.device):
        return device.type in ("cuda", "npu")
    return isinstance(device, str) and device.split(":")[0] in ("cuda", "npu")


def _with_numbered_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that a number as keyword `device` means the CPU."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if type(kwargs.get("device")) is int:
            kwargs["device"] = cpu_adaptor.CPU
        return function(*args, **kwargs)

    return wrapper


def _to_numbered_device(to: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.to` so that a number as device means the CPU."""
    to = _with_numbered_device(to)

    @functools.wraps(to)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (cpu_adaptor.CPU, *args[1:])
        return to(self, *args, **kwargs)

    return wrapper


def _on_gloo(function: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Wrap a function so that the backends hccl and nccl become gloo, without options of HCCL.

    index: of the backend among the positional arguments
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") in BACKENDS:
            kwargs["backend"] = "gloo"
        if len(args) > index and args[index] in BACKENDS:
            args = (*args[:index], "gloo", *args[index + 1 :])
        kwargs.pop("device_id", None)
        if isinstance(kwargs.get("pg_options"), Options):
            del kwargs["pg_options"]
        return function(*args, **kwargs)

    return wrapper


def _barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> None:
    """Wait for all ranks of the group. torch's own barrier would look for a real accelerator."""
    assert not async_op, "the stand-in supports only a barrier that waits"
    (group or dist.group.WORLD).barrier().wait()


def apply() -> None:
    cpu_adaptor._is_cuda = is_accelerator
    cpu_adaptor.FACTORIES = (*cpu_adaptor.FACTORIES, *MORE_FACTORIES)
    cpu_adaptor.apply()
    for name in cpu_adaptor.FACTORIES:
        setattr(torch, name, _with_numbered_device(getattr(torch, name)))
    for name in METHODS:
        method = cpu_adaptor._on_cpu(getattr(torch.Tensor, name))
        setattr(torch.Tensor, name, _with_numbered_device(method))
    torch.Tensor.to = _to_numbered_device(torch.Tensor.to)
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    dist.init_process_group = _on_gloo(dist.init_process_group, 0)
    dist.barrier = _barrier
    dist.new_group = _on_gloo(dist.new_group, 2)


apply()
