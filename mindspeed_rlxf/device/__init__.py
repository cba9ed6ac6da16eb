"""One interface to npu, cuda and cpu; no other package names them.

`setup` runs once per worker process, before anything imports Megatron; it selects the device and
applies its adaptor (MindSpeed's on NPU, none on CUDA, our own on CPU).
"""

from mindspeed_rlxf.device.facade import (
    backend as backend,
    communicator_bytes as communicator_bytes,
    count_by_torch as count_by_torch,
    current_device as current_device,
    device_count as device_count,
    device_name as device_name,
    environment_problems as environment_problems,
    fuses_layers as fuses_layers,
    host_memory as host_memory,
    load_library as load_library,
    memory_total as memory_total,
    network_environment as network_environment,
    peak_memory as peak_memory,
    process_bytes as process_bytes,
    ray_resource as ray_resource,
    reset_peak_memory as reset_peak_memory,
    resolve_kind as resolve_kind,
    seed_all as seed_all,
    select_first_device as select_first_device,
    set_deterministic as set_deterministic,
    setup as setup,
    shared_memory_environment as shared_memory_environment,
    smallest_device_memory as smallest_device_memory,
    synchronize as synchronize,
    visible_devices_variable as visible_devices_variable,
)
