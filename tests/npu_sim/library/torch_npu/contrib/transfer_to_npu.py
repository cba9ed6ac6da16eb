"""Redirect calls of CUDA to NPU, as torch_npu's module of this name does.

Only Megatron needs this. A call of `torch.cuda` from `mindspeed_rlxf` raises RuntimeError, because
there only the device layer may name a device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from torch_npu import npu

# The functions that torch_npu redirects, v2.7.1-7.3.0
FACTORIES = (
    "randint", "rand", "full_like", "ones_like", "rand_like", "randperm", "arange", "normal",
    "empty_strided", "empty_like", "scalar_tensor", "ones", "randn", "tensor", "as_tensor", "zeros",
    "randint_like", "full", "eye", "empty", "zeros_like", "randn_like", "linspace", "load",
)  # fmt: skip
METHODS = (
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_tensor",
    "new_zeros",
    "to",
)
TYPES = {
    "FloatTensor": torch.float32, "HalfTensor": torch.float16, "BFloat16Tensor": torch.bfloat16,
    "DoubleTensor": torch.float32, "IntTensor": torch.int32, "LongTensor": torch.int64,
    "ByteTensor": torch.uint8, "BoolTensor": torch.bool,
}  # fmt: skip
PACKAGE, ALLOWED = "mindspeed_rlxf", "mindspeed_rlxf.device"


def as_npu(device: Any, numbers: bool = False) -> Any:
    """Return the NPU for a CUDA device, anything else unchanged. numbers: an int is a device too"""
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("npu") if device.index is None else torch.device("npu", device.index)
    if isinstance(device, str) and device.split(":")[0] == "cuda":
        return device.replace("cuda", "npu")
    return f"npu:{device}" if numbers and type(device) is int else device


def on_npu(function: Callable[..., Any], numbers: bool = False) -> Callable[..., Any]:
    """Wrap a function so that its CUDA devices become NPUs; numbers: as in `as_npu`."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for name in ("device", "map_location"):
            if name in kwargs:
                kwargs[name] = as_npu(kwargs[name], numbers=True)
        return function(*[as_npu(arg, numbers) for arg in args], **kwargs)

    return wrapper


def over_hccl(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args = tuple("hccl" if arg == "nccl" else arg for arg in args)
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "hccl"
        return function(*args, **kwargs)

    return wrapper


def tensor_type(dtype: torch.dtype) -> Any:
    def make(*args: Any) -> torch.Tensor:
        if args and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=dtype, device="npu")
        return torch.empty(args, dtype=dtype, device="npu")

    return make


class Guarded(ModuleType):
    """`torch.cuda`, with a RuntimeError for calls from modules of our package outside `device`."""

    def __getattribute__(self, name: str) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        ours = caller == PACKAGE or caller.startswith(f"{PACKAGE}.")
        if ours and not name.startswith("__") and not caller.startswith(ALLOWED):
            raise RuntimeError(
                f"torch.cuda.{name} must not be used by {caller}: only {ALLOWED} names a device; "
                "call its facade"
            )
        return super().__getattribute__(name)


def apply() -> None:
    for name in FACTORIES:
        setattr(torch, name, on_npu(getattr(torch, name)))
    for name in METHODS:
        setattr(torch.Tensor, name, on_npu(getattr(torch.Tensor, name), numbers=name == "to"))
    torch.nn.Module.to = on_npu(torch.nn.Module.to, numbers=True)
    torch.Tensor.cuda, torch.nn.Module.cuda = torch.Tensor.npu, torch.nn.Module.npu
    torch.Tensor.is_cuda = torch.Tensor.is_npu
    cuda = torch.cuda
    for name in vars(npu):
        if not name.startswith("__"):
            setattr(cuda, name, getattr(npu, name))
            if hasattr(cuda.random, name):
                setattr(cuda.random, name, getattr(npu, name))
    for name, dtype in TYPES.items():
        setattr(cuda, name, tensor_type(dtype))
    dist.init_process_group = over_hccl(on_npu(dist.init_process_group))
    dist.new_group = over_hccl(dist.new_group)
    dist.ProcessGroup._get_backend = on_npu(dist.ProcessGroup._get_backend)
    cuda.__class__ = Guarded


apply()
