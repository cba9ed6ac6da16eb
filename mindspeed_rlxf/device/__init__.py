"""Common interface to npu, cuda and cpu; no other package names them.

`setup` runs once per worker process before Megatron is imported. It selects the device and applies
its adaptor: MindSpeed's on NPU, none on CUDA, our own on CPU.
"""

import importlib.util
import os
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import control_group, driver, megatron_imports, npu, visible
from mindspeed_rlxf.device.peaks import find_peak


@dataclass(frozen=True)
class DeviceFacts:
    """Constants for a device kind."""

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
DETERMINISTIC_CUDA: Mapping[str, str] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}

_active: DeviceKind | None = None
_index = 0  # of the device that `setup` selected, among the visible ones


def resolve_kind(kind: DeviceKind) -> DeviceKind:
    """Resolve `auto`: NPU if torch_npu is installed, else CUDA if available, else CPU."""
    if kind is not DeviceKind.AUTO:
        return kind
    if importlib.util.find_spec("torch_npu") is not None:
        return DeviceKind.NPU
    return DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU


def device_count(kind: DeviceKind) -> int | None:
    """Return the number of devices visible on this host; None = unlimited (CPU)."""
    kind = resolve_kind(kind)
    return npu.count_npus() if kind is DeviceKind.NPU else count_by_torch(kind)


def count_by_torch(kind: DeviceKind) -> int | None:
    """Return the number of devices torch sees, on NPU in a separate process; None on CPU."""
    kind = resolve_kind(kind)
    if kind is DeviceKind.CPU:
        return None
    return npu.count_by_torch() if kind is DeviceKind.NPU else torch.cuda.device_count()


def facts(kind: DeviceKind) -> DeviceFacts:
    """Return the device kind's constants."""
    return FACTS[resolve_kind(kind)]


def shared_memory_environment(kind: DeviceKind) -> dict[str, str]:
    """Return the variable for expandable allocator segments; {} on CPU.

    Freed memory can then serve blocks with other sizes.
    """
    name = facts(kind).allocator
    return {} if name is None else {name: "expandable_segments:True"}


def setup(
    kind: DeviceKind,
    threads: int = 1,
    local_rank: int = 0,
    assigned: str | None = None,
    deadline_s: float | None = None,
    megatron: bool = True,
) -> torch.device:
    """Select this process's device, apply its adaptor, and return the device.

    Call it before importing Megatron. A second call only sets the threads, since adaptors cannot be
    removed. Megatron can no longer import wandb and TensorBoard afterwards. Adaptors change torch,
    so a process of another training engine (`megatron` False) gets none.

    Args:
        kind: Device kind.
        threads: CPU threads for torch.
        local_rank: Index among the visible devices; used if `assigned` is None.
        assigned: Host-wide device number from Ray.
        deadline_s: Longest wait in a collective; NPU only.
        megatron: Whether this process computes with Megatron.

    Raises:
        ValueError: The device is not visible, or NPU software is missing or incompatible.
    """
    global _active, _index
    kind = resolve_kind(kind)
    torch.set_num_threads(threads)
    if _active is not None:
        assert _active is kind, f"device already set up as {_active.value}, not {kind.value}"
        return current_device()
    megatron_imports.hide_trackers()
    if kind is DeviceKind.CPU:
        if megatron:
            from mindspeed_rlxf.device import cpu_adaptor

            cpu_adaptor.apply()
    elif kind is DeviceKind.CUDA:
        num_visible = torch.cuda.device_count()
        variable = FACTS[kind].visible_devices
        if assigned is not None:
            local_rank = visible.index_within(assigned, variable, num_visible)
        torch.cuda.set_device(visible.check_index(local_rank, variable, num_visible))
    else:
        npu.start(local_rank, assigned, deadline_s, megatron)
    _active = kind
    library = active_library()
    _index = 0 if library is None else library.current_device()
    return current_device()


def select_in_thread() -> None:
    """Make the device of `setup` current in this thread too; does nothing on CPU.

    A thread begins with the first visible device, on which its first operation opens a context.
    """
    library = active_library()
    if library is not None:
        library.set_device(_index)


def select_first_device(kind: DeviceKind) -> torch.device:
    """Make the first visible device current and return it, or raise ValueError; without `setup`."""
    kind = resolve_kind(kind)
    if kind is DeviceKind.CPU:
        return torch.device("cpu")
    if kind is DeviceKind.NPU:
        npu.import_torch_npu()  # registers torch.npu
    getattr(torch, FACTS[kind].torch_type).set_device(0)
    return torch.device(FACTS[kind].torch_type, 0)


def current_device() -> torch.device:
    """Return the device selected by `setup`."""
    assert _active is not None, "device.setup has not run in this process"
    library = active_library()
    if library is None:
        return torch.device("cpu")
    return torch.device(FACTS[_active].torch_type, library.current_device())


def fuses_layers() -> bool:
    """Return whether models use Megatron layers fused by MindSpeed: only on NPU."""
    return _active is DeviceKind.NPU


def tries_kernels() -> bool:
    """Return whether `kernels.find` should look for fused operators: only on CUDA."""
    return _active is DeviceKind.CUDA


def tries_flash_attention() -> bool:
    """Return whether `flash_attention_2` of transformers may work here: on CUDA and NPU."""
    return _active in (DeviceKind.CUDA, DeviceKind.NPU)


def identity() -> str:
    """Return this device's name in handles of its memory, as vLLM and vllm-ascend write it.

    CUDA: its UUID. NPU: the host's address and the number of the chip.
    """
    if _active is DeviceKind.CUDA:
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    assert _active is DeviceKind.NPU, "memory of the host has no handles"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("8.8.8.8", 80))  # chooses an interface; nothing is sent
            address = probe.getsockname()[0]
    except OSError:  # no default route
        address = socket.gethostbyname(socket.gethostname())
    return f"{address}-{host_number()}"


def host_number() -> str:
    """Return this device's number on the host, or what the variable for visible devices has."""
    assert _active is not None, "device.setup has not run in this process"
    index = current_device().index or 0
    listed = visible.list_visible(FACTS[_active].visible_devices)
    return listed[index] if listed else str(index)


def seed_all(seed: int) -> None:
    """Seed Python, numpy (modulo 2**32) and torch, but not Megatron's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_deterministic(deterministic: bool | None) -> None:
    """Make this process's kernels and collectives bitwise reproducible.

    Sets missing environment variables and torch's deterministic mode, in which operators without a
    deterministic implementation raise RuntimeError. Call it before any computation, since libraries
    read their variables when they start.

    Args:
        deterministic: None = only on CPU and before `setup`.
    """
    if deterministic is None:
        deterministic = _active in (None, DeviceKind.CPU)
    if not deterministic:
        return
    variables = {DeviceKind.CUDA: DETERMINISTIC_CUDA, DeviceKind.NPU: npu.DETERMINISTIC}
    for name, value in variables.get(_active or DeviceKind.CPU, {}).items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Slow, and only useful to find reads of memory that was never written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def active_library() -> Any:
    """Return torch's module for the active device (`torch.npu`); None on CPU or before `setup`."""
    if _active in (None, DeviceKind.CPU):
        return None
    return getattr(torch, FACTS[_active].torch_type)


def synchronize() -> None:
    """Wait until the device has finished all launched work, e.g. to measure time; not on CPU."""
    library = active_library()
    if library is not None:
        library.synchronize()


def release_cache() -> None:
    """Return memory that torch keeps for reuse to the driver, so that other processes can have it.

    Also memory that other processes have read by a handle, and closed. Does nothing on CPU.
    """
    library = active_library()
    if library is not None:
        library.ipc_collect()
        library.empty_cache()


def device_name() -> str:
    """Return the device model; empty on CPU."""
    library = active_library()
    return "" if library is None else str(library.get_device_name())


def reset_peak_memory() -> None:
    """Reset this process's peak device memory; does nothing on CPU."""
    library = active_library()
    if library is not None:
        library.reset_peak_memory_stats()


def peak_memory() -> int:
    """Return the peak bytes since `reset_peak_memory`; on CPU the current resident memory."""
    library = active_library()
    if library is not None:
        return int(library.max_memory_allocated())
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_total() -> int:
    """Return the device memory in bytes; on CPU `host_memory`."""
    library = active_library()
    return host_memory() if library is None else int(library.mem_get_info()[1])


def smallest_device_memory(kind: DeviceKind) -> int | None:
    """Return the smallest device memory on this host, in bytes; None = unknown, or CPU."""
    view = driver.query_driver(resolve_kind(kind))
    if view is None:
        return None
    sizes_mib = [device.memory_mib for device in view.devices if device.memory_mib]
    return min(sizes_mib) * MIB if sizes_mib else None


def lowest_peak(kind: DeviceKind) -> float | None:
    """Return the lowest dense bf16 peak of this host's devices, FLOP/s; None = one is unknown."""
    kind = resolve_kind(kind)
    view = driver.query_driver(kind)
    prefix = "Ascend" if kind is DeviceKind.NPU else ""  # which npu-smi leaves out
    peaks = [find_peak(f"{prefix}{each.name}") for each in view.devices] if view else []
    known = [peak for peak in peaks if peak is not None]
    return min(known) if known and len(known) == len(peaks) else None


def network_environment(kind: DeviceKind, ip: str) -> dict[str, str]:
    """Return variables binding gloo, and HCCL on NPU, to the interface with address `ip`.

    Empty if no local interface has it. By default gloo uses the host name's address, often a
    loopback address unreachable from other hosts, and HCCL the first interface. NCCL finds other
    hosts itself.
    """
    import psutil

    names = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.address.partition("%")[0] == ip for address in addresses)
    ]
    if not names:
        return {}
    variables = {"GLOO_SOCKET_IFNAME": names[0], "TP_SOCKET_IFNAME": names[0]}
    if resolve_kind(kind) is DeviceKind.NPU and "HCCL_SOCKET_IFNAME" not in os.environ:
        variables["HCCL_IF_IP"] = ip
    return variables


def second_ports(kind: DeviceKind) -> dict[str, str]:
    """Return variables with HCCL's ports for a group of processes beside training; else {}."""
    return dict(npu.SECOND_PORTS) if resolve_kind(kind) is DeviceKind.NPU else {}


def process_bytes(kind: DeviceKind) -> int:
    """Estimate device memory for a process without tensors; 0 on CPU."""
    return facts(kind).process_mib * MIB


def communicator_bytes(kind: DeviceKind) -> int:
    """Estimate device memory for one process group's buffers; 0 on CPU."""
    if resolve_kind(kind) is DeviceKind.NPU:
        return npu.communicator_mib(os.environ) * MIB
    return facts(kind).communicator_mib * MIB


def host_memory() -> int:
    """Return this host's memory in bytes, or the container's limit if lower."""
    limit = control_group.read_amount(control_group.Amount.MEMORY_LIMIT)
    return int(min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), limit))


def to_text(state: Tensor) -> str:
    """Return a generator state, [bytes] uint8, as hexadecimal digits."""
    return bytes(state.cpu().numpy().tobytes()).hex()


def from_text(text: str) -> Tensor:
    """Return the state, [bytes] uint8, written by `to_text`."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def process_state() -> dict[str, Any]:
    """Return the JSON-ready generator states: torch, device (None on CPU), numpy, Python."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, normal = random.getstate()
    library = active_library()
    return {
        "torch": to_text(torch.get_rng_state()),
        "device": None if library is None else to_text(library.get_rng_state()),
        "numpy": [keys.tolist(), position, has_gauss, gauss],  # type: ignore[union-attr]
        "python": [version, list(words), normal],
    }


def load_process_state(state: dict[str, Any]) -> bool:
    """Restore `process_state`; False, changing nothing, if it is from another device kind."""
    library = active_library()
    device_state = "" if library is None else to_text(library.get_rng_state())
    if len(device_state) != len(state["device"] or ""):
        return False
    if library is not None:
        library.set_rng_state(from_text(state["device"]))
    torch.set_rng_state(from_text(state["torch"]))
    words, *position = state["numpy"]
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), *position))
    version, words, normal = state["python"]
    random.setstate((version, tuple(words), normal))
    return True
