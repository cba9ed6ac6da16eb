"""Run unmodified megatron-core on CPU under gloo.

Megatron uses `torch.cuda` and `device="cuda"` throughout. On NPU torch_npu redirects them; here
they are redirected to the CPU. `apply` runs once per worker process, before Megatron is imported,
and never in the driver.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._device import _device_constructors


def wrap_collectives() -> None:
    """Replace three `torch.distributed` functions for all callers; call it once."""
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
    """Wrap all_gather to accept outputs with different shapes."""

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
    """Wrap reduce_scatter to accept inputs with different first dimensions.

    One all_reduce sums such inputs, and each rank copies its slice. The same happens to all inputs
    if this gloo version lacks reduce_scatter.
    """

    @functools.wraps(scatter)
    def wrapper(output: Tensor, inputs: list[Tensor], group: Any = None, **kwargs: Any) -> Any:
        if len({tensor.shape for tensor in inputs}) <= 1:
            try:
                return scatter(output, inputs, group=group, **kwargs)
            except RuntimeError as error:  # gloo of torch 2.7 has none
                if "does not support reduce_scatter" not in str(error):
                    raise
        assert not kwargs.get("async_op"), "inputs are summed and scattered synchronously"
        assert kwargs.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM, "only sums are supported"
        summed = torch.cat(inputs)
        dist.all_reduce(summed, group=group)
        slices = summed.split([len(tensor) for tensor in inputs])
        output.copy_(slices[dist.get_rank(group)])
        return None

    return wrapper


def share_device() -> None:
    """Patch `ProcessGroupGloo` once, so new groups share this process's gloo devices."""
    gloo: Any = dist.ProcessGroupGloo
    make = gloo.__init__

    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = gloo._Options()
        options._timeout = timeout
        options._devices = _make_devices()
        options._threads = 2 * len(options._devices)  # as torch does
        make(self, store, rank, size, options)

    gloo.__init__ = init


@functools.cache
def _make_devices() -> list[Any]:
    gloo: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]


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
    """Redirect CUDA devices and calls to the CPU in this process; call it once.

    Also patches gloo's collectives and devices.
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

    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        # not torch.manual_seed, which seeds every device and would call this function again
        module.manual_seed = module.manual_seed_all = torch.default_generator.manual_seed
        module.initial_seed = lambda: torch.initial_seed()

    wrap_collectives()
    share_device()


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
    # For `torch.compile`, as on NPU: loading the compiler takes three of the four seconds of
    # Megatron's import, which decorates fused functions that a CPU run does not use.
    return function if function is not None else _uncompiled


def _type_with_cuda_prefix(original: Callable[..., Any]) -> Callable[..., Any]:
    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    return tensor_type


class _Stream(torch.cpu.Stream):
    """A CPU stream with `record_event`, called by Megatron's MoE token dispatcher."""

    def record_event(self, event: Any = None) -> Any:
        return torch.cpu.Event()

    def synchronize(self) -> None:
        """Do nothing; megatron-core 0.12 calls it instead of waiting for the event."""
