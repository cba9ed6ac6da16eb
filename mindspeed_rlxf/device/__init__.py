"""One interface to npu, cuda and cpu; no other package names them.

`setup` runs once per worker process, before anything imports Megatron; it selects the device and
applies its adaptor (MindSpeed's on NPU, none on CUDA, our own on CPU).
"""

from mindspeed_rlxf.device.facade import (
    backend as backend,
)
from mindspeed_rlxf.device.facade import (
    communicator_bytes as communicator_bytes,
)
from mindspeed_rlxf.device.facade import (
    count_by_torch as count_by_torch,
)
from mindspeed_rlxf.device.facade import (
    current_device as current_device,
)
from mindspeed_rlxf.device.facade import (
    device_count as device_count,
)
from mindspeed_rlxf.device.facade import (
    device_name as device_name,
)
from mindspeed_rlxf.device.facade import (
    environment_problems as environment_problems,
)
from mindspeed_rlxf.device.facade import (
    fuses_layers as fuses_layers,
)
from mindspeed_rlxf.device.facade import (
    host_memory as host_memory,
)
from mindspeed_rlxf.device.facade import (
    load_library as load_library,
)
from mindspeed_rlxf.device.facade import (
    memory_total as memory_total,
)
from mindspeed_rlxf.device.facade import (
    network_environment as network_environment,
)
from mindspeed_rlxf.device.facade import (
    peak_memory as peak_memory,
)
from mindspeed_rlxf.device.facade import (
    process_bytes as process_bytes,
)
from mindspeed_rlxf.device.facade import (
    ray_resource as ray_resource,
)
from mindspeed_rlxf.device.facade import (
    reset_peak_memory as reset_peak_memory,
)
from mindspeed_rlxf.device.facade import (
    resolve_kind as resolve_kind,
)
from mindspeed_rlxf.device.facade import (
    seed_all as seed_all,
)
from mindspeed_rlxf.device.facade import (
    select_first_device as select_first_device,
)
from mindspeed_rlxf.device.facade import (
    set_deterministic as set_deterministic,
)
from mindspeed_rlxf.device.facade import (
    setup as setup,
)
from mindspeed_rlxf.device.facade import (
    shared_memory_environment as shared_memory_environment,
)
from mindspeed_rlxf.device.facade import (
    smallest_device_memory as smallest_device_memory,
)
from mindspeed_rlxf.device.facade import (
    synchronize as synchronize,
)
from mindspeed_rlxf.device.facade import (
    visible_devices_variable as visible_devices_variable,
)
