"""Select the device, and answer the questions whose answers differ between npu, cuda and cpu."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import driver, megatron_imports, npu, npu_count, visible


@dataclass(frozen=True)
class DeviceFacts:
    torch_type: str  # torch.device type
    backend: str  # torch.distributed backend
    ray_resource: str  # resource that stands for one device
    visible_devices: str | None  # variable that hides devices from a process
    process_mib: int  # device memory of a process without tensors: context, libraries' workspace
    communicator_mib: int  # device memory of one process group's buffers
    allocator: str | None  # variable with settings of torch's allocator, read when it starts


# Rules of thumb; for NPU, `npu.communicator_mib` gives the size of a communicator.
FACTS = {
    DeviceKind.CPU: DeviceFacts("cpu", "gloo", "rlxf_cpu", None, 0, 0, None),
    DeviceKind.CUDA: DeviceFacts(
        "cuda", "nccl", "GPU", "CUDA_VISIBLE_DEVICES", 512, 128, "PYTORCH_CUDA_ALLOC_CONF"
    ),
    DeviceKind.NPU: DeviceFacts(
        "npu", "hccl", "NPU", "ASCEND_RT_VISIBLE_DEVICES", 512, 400, "PYTORCH_NPU_ALLOC_CONF"
    ),
}
MIB = 1024**2
DETERMINISTIC_CUDA = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}

_active: DeviceKind | None = None


def resolve_kind(kind: DeviceKind) -> DeviceKind:
    """Resolve `auto`: NPU if torch_npu is installed, else CUDA if a GPU answers, else CPU."""
    if kind is not DeviceKind.AUTO:
        return kind
    if importlib.util.find_spec("torch_npu") is not None:
        return DeviceKind.NPU
    return DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU


def device_count(kind: DeviceKind) -> int | None:
    """Count the devices of this host that a process may use; None = no limit (CPU).

    Imports no device library. Raises ValueError when NPUs cannot be counted.
    """
    kind = resolve_kind(kind)
    return npu_count.count_npus() if kind is DeviceKind.NPU else count_by_torch(kind)


def count_by_torch(kind: DeviceKind) -> int | None:
    """Count this host's devices with torch; on NPU in a separate process, which takes seconds.

    None = as many as asked for (CPU)
    """
    kind = resolve_kind(kind)
    if kind is DeviceKind.CPU:
        return None
    return npu_count.count_by_torch() if kind is DeviceKind.NPU else torch.cuda.device_count()


def backend(kind: DeviceKind) -> str:
    return FACTS[resolve_kind(kind)].backend


def ray_resource(kind: DeviceKind) -> str:
    return FACTS[resolve_kind(kind)].ray_resource


def visible_devices_variable(kind: DeviceKind) -> str | None:
    return FACTS[resolve_kind(kind)].visible_devices


def shared_memory_environment(kind: DeviceKind) -> dict[str, str]:
    """Return variables of torch's allocator that let freed memory serve blocks of other sizes.

    They make it map physical pages one after the other into segments that grow. Sources: torch's
    notes on CUDA, torch_npu's on `PYTORCH_NPU_ALLOC_CONF`. No variables on a CPU.
    """
    name = FACTS[resolve_kind(kind)].allocator
    return {} if name is None else {name: "expandable_segments:True"}


def setup(
    kind: DeviceKind,
    threads: int = 1,
    local_rank: int = 0,
    assigned: str | None = None,
    deadline_s: float | None = None,
) -> torch.device:
    """Select the device of this process and apply its adaptor. Call before importing Megatron.

    local_rank: index among the devices that this process sees, used if none is assigned
    assigned:   the device's number on the host, as Ray gave it to this process
    deadline_s: longest time that ranks may wait for each other in a collective

    A second call with the same kind only sets the thread count. Another kind is a programming
    error, because adaptors cannot be removed. Raises ValueError when a part of the installation is
    missing.
    """
    global _active
    kind = resolve_kind(kind)
    torch.set_num_threads(threads)
    if _active is not None:
        assert _active is kind, f"device already set up as {_active.value}, not {kind.value}"
        return current_device()
    megatron_imports.hide_trackers()
    if kind is DeviceKind.CPU:
        from mindspeed_rlxf.device import cpu_adaptor

        cpu_adaptor.apply()
    elif kind is DeviceKind.CUDA:
        seen = torch.cuda.device_count()
        if assigned is not None:
            local_rank = visible.index_within(assigned, FACTS[kind].visible_devices, seen)
        torch.cuda.set_device(visible.check_index(local_rank, FACTS[kind].visible_devices, seen))
    else:
        npu.start(local_rank, assigned, deadline_s)
    _active = kind
    return current_device()


def load_library(kind: DeviceKind) -> None:
    """Import the device's library; claims no device. Raises ValueError when it is missing."""
    if resolve_kind(kind) is DeviceKind.NPU:
        npu.library()  # registers torch.npu


def select_bare(kind: DeviceKind) -> torch.device:
    """Select the first visible device for a process that trains nothing; applies no adaptor."""
    kind = resolve_kind(kind)
    if kind is DeviceKind.CPU:
        return torch.device("cpu")
    load_library(kind)
    getattr(torch, FACTS[kind].torch_type).set_device(0)
    return torch.device(FACTS[kind].torch_type, 0)


def current_device() -> torch.device:
    """Return the device that tensors of this process live on."""
    assert _active is not None, "device.setup has not run in this process"
    if _active is DeviceKind.CPU:
        return torch.device("cpu")
    if _active is DeviceKind.CUDA:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("npu", npu.library().npu.current_device())


def fuses_layers() -> bool:
    """Whether models must use Megatron's own attention, norm and activation.

    So on NPU: there the adaptor replaces these by the device's fused operators.
    """
    return _active is DeviceKind.NPU


def tries_kernels() -> bool:
    """Whether `kernels.find` should look for fused operators: only on CUDA."""
    return _active is DeviceKind.CUDA


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch; the engine seeds Megatron's own streams."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_deterministic(wanted: bool | None) -> None:
    """Make kernels and collectives of this process give bitwise equal results for equal inputs.

    wanted: None = on CPU only

    Call it before anything is computed, as the libraries read their variables when they start.
    Variables that the user has set stay. Sources: torch's notes on reproducibility, NCCL's and
    HCCL's documentation of their variables, MindSpeed's own mode.
    """
    if wanted is None:
        wanted = _active in (None, DeviceKind.CPU)
    if not wanted:
        return
    variables: dict[str, str] = {}
    if _active is DeviceKind.CUDA:
        variables = DETERMINISTIC_CUDA
    elif _active is DeviceKind.NPU:
        variables = npu.deterministic_variables(os.environ)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Slow, and only useful to find reads of memory that was never written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def active_library() -> Any:
    """Return torch's module for this process's device, for example `torch.npu`; None on CPU."""
    if _active in (None, DeviceKind.CPU):
        return None
    return getattr(torch, FACTS[_active].torch_type)


def synchronize() -> None:
    """Wait for the device, so that a time measured afterwards includes the launched work."""
    library = active_library()
    if library is not None:
        library.synchronize()


def device_name() -> str:
    """Return the model of this process's device as its library names it; empty on CPU."""
    library = active_library()
    return "" if library is None else str(library.get_device_name())


def reset_peak_memory() -> None:
    """Reset the peak of this process's device memory. Does nothing on CPU."""
    library = active_library()
    if library is not None:
        library.reset_peak_memory_stats()


def peak_memory() -> int:
    """Return the peak bytes of tensors since `reset_peak_memory`.

    On CPU it is the present resident memory of the process, libraries included.
    """
    library = active_library()
    if library is not None:
        return int(library.max_memory_allocated())
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_total() -> int:
    """Return the bytes of memory of this device; on CPU those of the host."""
    library = active_library()
    return host_memory() if library is None else int(library.mem_get_info()[1])


def memory_unclaimed(kind: DeviceKind) -> int | None:
    """Return the bytes of this host's smallest device without claiming it; None = unknown, or CPU.

    The driver's tool reports them.
    """
    view = driver.driver_view(resolve_kind(kind))
    sizes = [each.memory_mib for each in view.devices if each.memory_mib] if view else []
    return min(sizes) * MIB if sizes else None


def network_environment(kind: DeviceKind, ip: str) -> dict[str, str]:
    """Return variables that make collectives use the interface with the address `ip`; may be empty.

    By default gloo uses the address of the host's name, often a loopback address that other hosts
    cannot reach. HCCL uses the first interface. NCCL finds other hosts by itself.
    """
    import psutil

    names = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.address.partition("%")[0] == ip for address in addresses)
    ]
    if not names:
        return {}
    found = {"GLOO_SOCKET_IFNAME": names[0], "TP_SOCKET_IFNAME": names[0]}
    if resolve_kind(kind) is DeviceKind.NPU and "HCCL_SOCKET_IFNAME" not in os.environ:
        found["HCCL_IF_IP"] = ip
    return found


def environment_problems(
    kind: DeviceKind, environment: Mapping[str, str]
) -> list[npu.Contradiction]:
    """Find variables of the device's libraries that contradict each other; only NPU has a rule.

    environment: the workers' variables
    """
    if resolve_kind(kind) is not DeviceKind.NPU:
        return []
    problem = npu.timeout_problem(environment)
    return [problem] if problem else []


def process_bytes(kind: DeviceKind) -> int:
    """Return the device memory that a process takes before any tensor."""
    return FACTS[resolve_kind(kind)].process_mib * MIB


def communicator_bytes(kind: DeviceKind) -> int:
    """Return the device memory that the buffers of one process group take."""
    if resolve_kind(kind) is DeviceKind.NPU:
        return npu.communicator_mib(os.environ) * MIB
    return FACTS[resolve_kind(kind)].communicator_mib * MIB


def host_memory() -> int:
    """Return the bytes of memory of this host, or the limit of the container if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            return min(total, int(file.read()))
    except (OSError, ValueError):  # no limit, or no such control group
        return total
