"""`torch_npu.npu`, which is also `torch.npu`: the runtime of the simulated device.

Environment variables: RLXF_SIM_DEVICES and ASCEND_RT_VISIBLE_DEVICES (number of devices),
RLXF_SIM_MEMORY_MIB (memory of each), RLXF_SIM_DELAYED=1 (non-blocking copies end late),
RLXF_SIM_PAIRS (folder for a file with the pairs of operator and dtype that the process called).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.npu_sim import build

from . import records

_device = build.load()
_initialized = False
default_generators = tuple(_device.generator(i) for i in range(16))


def follow_environment() -> None:
    _device.set_delayed(os.environ.get("RLXF_SIM_DELAYED") == "1")
    if folder := os.environ.get("RLXF_SIM_PAIRS"):
        _device.record_pairs(True)
        atexit.register(_write_pairs, Path(folder))


def _write_pairs(folder: Path) -> None:
    text = json.dumps(sorted(_device.recorded_pairs()))
    (folder / f"pairs.{os.getpid()}.json").write_text(text, encoding="utf-8")


# --- devices ---
def _index(of: Any) -> int:
    """Return the index of a device given as None (the current one), name, torch.device or int."""
    if of is None:
        return current_device()
    if isinstance(of, str):
        of = torch.device(of)
    if isinstance(of, torch.device):
        return current_device() if of.index is None else of.index
    return int(of)


def device_count() -> int:
    return int(_device.device_count())


def current_device() -> int:
    return int(_device.current_device())


def set_device(of: Any) -> None:
    _device.set_device(_index(of))
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "all")
    records.record(f"device {current_device()} of {visible}")


class device:
    def __init__(self, of: Any) -> None:
        self._inside = _index(of)

    def __enter__(self) -> None:
        self._outside = current_device()
        _device.set_device(self._inside)

    def __exit__(self, *_: Any) -> None:
        _device.set_device(self._outside)


def is_available() -> bool:
    return device_count() > 0


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


def get_device_name(device: Any = None) -> str:
    return "Ascend910B2"


def set_compile_mode(jit_compile: bool = False) -> None:
    """Nothing is compiled."""


# --- memory ---
def mem_get_info(device: Any = None) -> tuple[int, int]:
    used, _, limit = _device.memory(_index(device))
    return limit - used, limit


def memory_allocated(device: Any = None) -> int:
    return int(_device.memory(_index(device))[0])


def max_memory_allocated(device: Any = None) -> int:
    return int(_device.memory(_index(device))[1])


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    _device.reset_peak(_index(device))


def empty_cache() -> None:
    """Nothing is cached."""


def ipc_collect() -> None:
    """No memory is shared."""


# --- streams ---
class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **more: Any) -> Any:
        if more:  # the ids of an existing stream
            return super().__new__(cls, **more)
        return super().__new__(cls, torch.device("npu", _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Any:
        return super().__new__(
            cls, "npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


def current_stream(device: Any = None) -> Any:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> Any:
    return Stream(stream_id=0, device_index=_index(device), device_type=_TYPE)


_TYPE = 20  # of PrivateUse1 among torch's device types


def set_stream(of: Any) -> None:
    torch.accelerator.set_stream(of)


@contextlib.contextmanager
def stream(of: Any) -> Iterator[None]:
    """Work on a stream inside the block; None = on the current one."""
    if of is None:
        yield
        return
    before = current_stream(of.device)
    set_stream(of)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(device: Any = None) -> None:
    _device.synchronize_device(_index(device))


# --- random numbers: each device has a stream of its own ---
def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return int(default_generators[current_device()].initial_seed())


def get_rng_state(device: Any = None) -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    records.record(f"random state {zlib.crc32(state.numpy().tobytes()):08x}")
    default_generators[_index(device)].set_state(state)


class mstx:
    """Marks for a profiler, without effect."""

    @staticmethod
    def range_start(message: str = "", stream: Any = None) -> int:
        return 0

    @staticmethod
    def range_end(number: int = 0) -> None:
        """Do nothing."""


# --- HCCL ---
def register_hccl() -> None:
    """Register the backend hccl, and replace the calls of torch.distributed that torch_npu does."""
    if not hasattr(dist.Backend, "HCCL"):
        dist.Backend.register_backend("hccl", _make_group, extended_api=True, devices=["npu"])
    for module in (dist, dist.distributed_c10d):
        module.batch_isend_irecv = _batch_isend_irecv
        module.gather, module.gather_object = _gather, _gather_object


def _batch_isend_irecv(operations: list[Any]) -> list[Any]:
    """Send and receive by rank in the group (torch_npu's distributed_c10d.py, v2.7.1-7.3.0)."""
    works = []
    for each in operations:
        group = each.group or dist.group.WORLD
        device = each.tensor.device
        if device.type != "npu" and "npu" in {d.type for d in group._device_types}:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        peer = dist.get_group_rank(group, each.peer) if each.group else each.peer
        call = group.send if each.op is dist.isend else group.recv
        works.append(call([each.tensor], peer, each.tag))
    return works


def _gather(
    tensor: Any, gather_list: Any = None, dst: int = 0, group: Any = None, async_op: bool = False
) -> Any:
    """Gather on all ranks, as torch_npu does, because HCCL has no gather."""
    parts = gather_list or [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    return dist.all_gather(parts, tensor, group=group, async_op=async_op)


def _gather_object(
    obj: Any, object_gather_list: Any = None, dst: int = 0, group: Any = None, **_: Any
) -> None:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, obj, group=group)
    if object_gather_list is not None:
        object_gather_list[:] = found


def _make_group(group: Any, options: Any) -> Any:
    """ProcessGroupHCCL.cpp (v2.7.1-7.3.0): a group without a list of ranks is the global one."""
    if not group.global_ranks_in_group and dist.is_initialized():
        raise RuntimeError(
            "HCCL: a group with an empty list of ranks is the process's global group, which is "
            "there already; pass the list of its ranks"
        )
    check_timeouts(os.environ)
    gloo = dist.ProcessGroupGloo(
        group.store, group.group_rank, group.group_size, timeout=group.timeout
    )
    return _device.make_hccl(gloo)


def check_timeouts(environment: Any) -> None:
    """Raise RuntimeError where HCCL_EVENT_TIMEOUT is not longer than HCCL_EXEC_TIMEOUT.

    ProcessGroupHCCL.cpp (v2.7.1-7.3.0) only warns; an error cannot be overlooked.
    """
    event = int(environment.get("HCCL_EVENT_TIMEOUT", -1))
    execute = int(environment.get("HCCL_EXEC_TIMEOUT", 1836))
    if event > 0 and (event <= execute or execute == 0):
        raise RuntimeError(
            f"The value of HCCL_EVENT_TIMEOUT:{event} is less than or equal to the value of "
            f"HCCL_EXEC_TIMEOUT:{execute}: raise the first, or lower the second"
        )


def __getattr__(name: str) -> Any:
    raise AttributeError(f"the simulated torch_npu.npu has no {name!r}")
