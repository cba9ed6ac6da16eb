"""`torch_npu.npu`, which is also `torch.npu`: every device is the CPU.

RLXF_STANDIN_DEVICES is the number of devices of the host (1), ASCEND_RT_VISIBLE_DEVICES lists those
that the process sees.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable
from typing import Any

import torch

from . import records

Event = torch.cpu.Event
_initialized = False
_device = 0


def device_count() -> int:
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    return len(visible.split(",")) if visible else int(os.environ.get("RLXF_STANDIN_DEVICES", 1))


class Stream(torch.cpu.Stream):
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        super().__init__(priority)

    def record_event(self, event: Any = None) -> Any:
        return torch.cpu.Event()

    def synchronize(self) -> None:
        """Do nothing: every call returns when its work is done."""


class device(contextlib.nullcontext):
    def __init__(self, index: Any) -> None:
        super().__init__()


def is_available() -> bool:
    return True


def init() -> None:
    global _initialized
    _initialized = True


_lazy_init = init


def is_initialized() -> bool:
    return _initialized


def _is_in_bad_fork() -> bool:
    return False


def _lazy_call(call: Callable[[], Any], **kwargs: Any) -> None:
    call()


def current_device() -> int:
    return _device


def set_device(index: Any) -> None:
    """Select a device, by number or torch.device, and record it. Fails for one not visible."""
    global _device
    number = getattr(index, "index", index) or 0
    assert number < device_count(), f"the stand-in shows {device_count()} devices, not {index}"
    _device = number
    records.record(f"device {number} of {os.environ.get('ASCEND_RT_VISIBLE_DEVICES', 'all')}")


def set_compile_mode(jit_compile: bool = False) -> None:
    """Do nothing: no operator is compiled."""


def synchronize(device: Any = None) -> None:
    """Do nothing: every call returns when its work is done."""


def empty_cache() -> None:
    """Do nothing: the CPU has no cache of tensors."""


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return 32 * 1024**3, 64 * 1024**3


def memory_allocated(device: Any = None) -> int:
    return 0


max_memory_allocated = memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    """Do nothing: memory is not counted."""


def get_device_name(device: Any = None) -> str:
    return "Ascend910B2"


def manual_seed(seed: int) -> None:
    # not torch.manual_seed, which seeds every device and would call this function
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    records.record(f"random state {zlib.crc32(state.numpy().tobytes()):08x}")
    torch.set_rng_state(state)


class mstx:
    """Marks for a profiler, without effect."""

    @staticmethod
    def range_start(message: str = "", stream: Any = None) -> int:
        return 0

    @staticmethod
    def range_end(number: int = 0) -> None:
        """Do nothing."""


default_generators = (torch.default_generator,)


def stream(of: Any) -> Any:
    return contextlib.nullcontext()


def current_stream(device: Any = None) -> Stream:
    return Stream()


default_stream = current_stream


def __getattr__(name: str) -> Any:
    raise AttributeError(f"the stand-in for torch_npu.npu has no {name!r}")
