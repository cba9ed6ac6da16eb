"""Find the memory of devices and hosts, and the free disk, without claiming or writing any."""

from __future__ import annotations

import shutil
from pathlib import Path

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind, RuntimeKind
from mindspeed_rlxf.config.rules.host import GIB, joined_address
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.sizes import existing_folder


def is_joined(config: RunConfig) -> bool:
    """Whether the run joins a cluster, whose hosts are unknown here."""
    return config.runtime.kind is RuntimeKind.RAY and joined_address(config) is not None


def on_cpu(config: RunConfig) -> bool:
    """Whether roles use the hosts' memory: the device is a CPU."""
    return device.resolve_kind(config.device.kind) is DeviceKind.CPU


def device_memory(config: RunConfig) -> int | None:
    """Return the bytes of a device: as configured, else of this host's smallest; None = unknown."""
    if config.device.memory_gib is not None:
        return int(config.device.memory_gib * GIB)
    return None if is_joined(config) else device.memory_unclaimed(config.device.kind)


def rollout_memory(config: RunConfig) -> int | None:
    """Return the bytes that a rollout process may use; None = unknown.

    On CPU the generating ranks share the host's memory equally, unless `device.memory_gib` is set.
    """
    if config.device.memory_gib is not None or not on_cpu(config):
        return device_memory(config)
    return None if is_joined(config) else device.host_memory() // config.rollout_layout.world_size


def host_memory(config: RunConfig) -> int | None:
    """Return the bytes of the host that all workers run on; None = some run on other hosts."""
    return None if is_joined(config) else device.host_memory()


def free_disk(folder: Path) -> int:
    """Return the bytes that are free on the disk where `folder` is or will be made."""
    return shutil.disk_usage(existing_folder(folder)).free
