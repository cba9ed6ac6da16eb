"""Let unmodified megatron-core run on a CPU under gloo.

Megatron uses `torch.cuda` and `device="cuda"` throughout. On NPU torch_npu redirects them to the
NPU; here they are redirected to the CPU. `apply` runs once per worker process, before Megatron is
imported, and never in the driver.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from mindspeed_rlxf.device import gloo

FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "rand", "randn", "arange", "randint", "as_tensor",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
)  # fmt: skip
TENSOR_TYPES = (
    "FloatTensor", "HalfTensor", "BFloat16Tensor", "DoubleTensor", "IntTensor", "LongTensor",
    "ByteTensor", "BoolTensor",
)  # fmt: skip
CPU = torch.device("cpu")


def apply() -> None:
    """Patch torch in this process: CUDA devices and calls become the CPU's; call it once.

    Also patches gloo's collectives and devices (`gloo.wrap_collectives`, `gloo.share_device`).
    """
    _device_constructors()  # make torch cache the originals, on which `with torch.device(...)` acts
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in TENSOR_TYPES:
        setattr(torch.cuda, name, getattr(torch, name))
    torch.Tensor.to = _on_cpu(torch.Tensor.to)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.type = _type_with_cuda_prefix(torch.Tensor.type)
    torch.compile = _uncompiled  # type: ignore[assignment]
    _patch_runtime()
    _patch_random_state()
    gloo.wrap_collectives()
    gloo.share_device()


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if any(_is_cuda(arg) for arg in args):
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        return function(*args, **kwargs)

    return wrapper


def _uncompiled(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """Stand in for `torch.compile`, as on NPU; return the function, or a decorator that does.

    Megatron decorates its fused functions when it is imported. A CPU run uses none of them, and
    loading the compiler takes three of the four seconds of that import.
    """
    return function if function is not None else _uncompiled


def _type_with_cuda_prefix(original: Callable[..., Any]) -> Callable[..., Any]:
    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    return tensor_type


class _Stream(torch.cpu.Stream):
    """A CPU stream with `record_event`, which Megatron's token dispatcher of experts calls."""

    def record_event(self, event: Any = None) -> Any:
        return torch.cpu.Event()

    def synchronize(self) -> None:
        """Do nothing; megatron-core 0.12 calls it instead of waiting for the event."""


def _patch_runtime() -> None:
    """Replace the functions of `torch.cuda` that Megatron calls by ones for the CPU."""
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.Stream = _Stream
    cuda.current_stream = cuda.default_stream = torch.cpu.current_stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.get_device_capability = lambda device=None: (0, 0)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: None


def _patch_random_state() -> None:
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        # not torch.manual_seed, which seeds every device and would call this function again
        module.manual_seed = module.manual_seed_all = torch.default_generator.manual_seed
        module.initial_seed = lambda: torch.initial_seed()
