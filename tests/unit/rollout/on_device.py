"""A tensor on the CPU that checks two rules of NPUs."""

from typing import Any

import torch
from torch import Tensor


class OnDevice(Tensor):
    """A tensor of a device that has no fp64 and cannot sum integers.

    An fp64 result, or a sum of integers, raises AssertionError. Results of operations are OnDevice
    too; `.cpu()` returns an ordinary tensor.
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
    """Return the tensor as OnDevice, on the same memory."""
    return tensor.as_subclass(OnDevice)
