"""One facade over npu, cuda and cpu: the only package that names them.

`setup` runs once per worker process, before anything imports Megatron; it selects the device and
applies its adaptor (MindSpeed on NPU, nothing on CUDA, our own on CPU).
"""

from mindspeed_rlxf.device.facade import (
    backend,
    communicator_bytes,
    count_by_torch,
    current_device,
    device_count,
    device_name,
    environment_problems,
    fuses_layers,
    host_memory,
    load_library,
    memory_total,
    memory_unclaimed,
    network_environment,
    peak_memory,
    process_bytes,
    ray_resource,
    reset_peak_memory,
    resolve_kind,
    seed_all,
    select_bare,
    set_deterministic,
    setup,
    synchronize,
    visible_devices_variable,
)

__all__ = [
    "backend",
    "communicator_bytes",
    "count_by_torch",
    "current_device",
    "device_count",
    "device_name",
    "environment_problems",
    "fuses_layers",
    "host_memory",
    "load_library",
    "memory_total",
    "memory_unclaimed",
    "network_environment",
    "peak_memory",
    "process_bytes",
    "ray_resource",
    "reset_peak_memory",
    "resolve_kind",
    "seed_all",
    "select_bare",
    "set_deterministic",
    "setup",
    "synchronize",
    "visible_devices_variable",
]
