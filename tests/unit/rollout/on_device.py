"""Tensors that keep the rules of an NPU, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class OnDevice(Tensor):
    """A tensor of a device that makes fp32 of fp64 and does not sum integers.

    What is computed from it is one too; `.cpu()` copies to the host. An operation that the device
    would round or refuse is an AssertionError.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.cpu:
            return args[0].as_subclass(Tensor)
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Tensor):
            assert out.dtype is not torch.float64, f"{func.__name__} gives fp64 on the device"
            sums = func in (Tensor.sum, torch.sum)
            assert out.is_floating_point() or not sums, "a sum of integers on the device"
        return out


def on_device(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnDevice)
