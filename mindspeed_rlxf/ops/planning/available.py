"""What there is: memory of a device, memory of a host, free disk. Nothing is claimed or written."""

from __future__ import annotations

import shutil
from pathlib import Path

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind, RuntimeKind
from mindspeed_rlxf.config.rules.host import GIB, joined_address
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.sizes import existing_folder


def is_joined(config: RunConfig) -> bool:
    """The workers run on hosts that this one knows nothing about."""
    return config.runtime.kind is RuntimeKind.RAY and joined_address(config) is not None


def on_cpu(config: RunConfig) -> bool:
    """What roles hold lies in the memory of the hosts."""
    return device.resolve_kind(config.device.kind) is DeviceKind.CPU


def device_memory(config: RunConfig) -> int | None:
    """Bytes of one device: as configured, else as this host's devices say; None = unknown."""
    if config.device.memory_gib is not None:
        return int(config.device.memory_gib * GIB)
    return None if is_joined(config) else device.memory_unclaimed(config.device.kind)


def rollout_memory(config: RunConfig) -> int | None:
    """What the rollout counts as the memory of its process; on CPU, where nothing is configured, an
    equal part of the host's for each rank that generates."""
    if config.device.memory_gib is not None or not on_cpu(config):
        return device_memory(config)
    return None if is_joined(config) else device.host_memory() // config.rollout_layout.world_size


def host_memory(config: RunConfig) -> int | None:
    """Bytes of the host that all workers run on; None = they run elsewhere too."""
    return None if is_joined(config) else device.host_memory()


def free_disk(folder: Path) -> int:
    """Bytes that are free where `folder` is or will be made."""
    return shutil.disk_usage(existing_folder(folder)).free
