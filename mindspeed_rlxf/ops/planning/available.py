"""Find device and host memory, and free disk space; claims no device, writes no file."""

import shutil
from collections.abc import Sequence

from mindspeed_rlxf import device
from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.host_rules import GIB, check_devices
from mindspeed_rlxf.config.ray_cluster import LOCAL, choose_cluster
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.sizes import existing_folder

OTHER_HOSTS = "other hosts"  # the address in a plan for several hosts whose cluster is not named


def look_once(config: RunConfig) -> RunConfig:
    """Return the configuration with the cluster, and the memory and disk of this host, if used.

    A plan reads them hundreds of times, but the driver's tool takes seconds and a cluster answers
    over TCP. The device kind is that of `choose_kind`.
    """
    config = choose_kind(config)
    if config.runtime.kind == "ray":
        address = choose_cluster(config.runtime.address).address
        if address is None and _needs_other_hosts(config):
            address = OTHER_HOSTS
            pools = {}
            for pool, sizes in config.resource_pool.items():
                pools[pool] = fill_hosts(sizes, config.device.devices_per_node)
            config = config.model_copy(update={"resource_pool": pools})
        runtime = config.runtime.model_copy(update={"address": address or LOCAL})
        config = config.model_copy(update={"runtime": runtime})
    plan_keys: dict[str, float] = {}
    host_bytes = host_memory(config)
    if host_bytes is not None:
        plan_keys["host_memory_gib"] = host_bytes / GIB
    disk_bytes = free_disk(config)
    if disk_bytes is not None:
        plan_keys["disk_gib"] = disk_bytes / GIB
    peak = peak_tflops(config)
    if peak is not None:
        plan_keys["peak_tflops"] = peak
    config = config.model_copy(update={"plan": config.plan.model_copy(update=plan_keys)})
    device_bytes = device_memory(config)
    if device_bytes is not None:
        device_keys = {"memory_gib": device_bytes / GIB}
        config = config.model_copy(update={"device": config.device.model_copy(update=device_keys)})
    return config


def choose_kind(config: RunConfig) -> RunConfig:
    """Return the configuration with the device kind that the plan is for.

    `device.memory_gib` means devices with memory of their own: on a host without any, `auto` is
    NPU.
    """
    has_own_memory = config.device.memory_gib is not None
    if config.device.kind is not DeviceKind.AUTO or not has_own_memory or not on_cpu(config):
        return config
    chosen = config.device.model_copy(update={"kind": DeviceKind.NPU})
    return config.model_copy(update={"device": chosen})


def is_joined(config: RunConfig) -> bool:
    """Return whether the run joins a Ray cluster, whose hosts cannot be inspected here."""
    address = choose_cluster(config.runtime.address).address
    return config.runtime.kind == "ray" and address is not None


def is_elsewhere(config: RunConfig) -> bool:
    """Return whether the plan is for another machine, whose memory and disk are not this host's.

    It is where `device.memory_gib` is given, a cluster is joined, or this host lacks something.
    """
    if config.device.memory_gib is not None or is_joined(config):
        return True
    return any(check_devices(config))


def _needs_other_hosts(config: RunConfig) -> bool:
    """Return whether the plan is for other hosts, as one of them has too few devices for it."""
    num_devices = sum(map(sum, config.resource_pool.values()))
    is_one_host = config.runtime.address == LOCAL or num_devices <= config.device.devices_per_node
    return not is_one_host and is_elsewhere(config)


def fill_hosts(sizes: Sequence[int], num_per_host: int) -> list[int]:
    """Split entries of a pool that are larger than a host: [20] is [8, 8, 4] on hosts of 8."""
    filled: list[int] = []
    for size in sizes:
        num_full, rest = divmod(size, num_per_host)
        filled += [num_per_host] * num_full
        if rest > 0:
            filled.append(rest)
    return filled


def on_cpu(config: RunConfig) -> bool:
    """Return whether roles run on CPU and so use host memory."""
    return device.resolve_kind(config.device.kind) is DeviceKind.CPU


def device_memory(config: RunConfig) -> int | None:
    """Return a device's bytes: `device.memory_gib`, else this host's smallest device.

    None = unknown, as on CPU or a joined cluster without `device.memory_gib`. Without the key this
    runs the driver's tool, which may take seconds.
    """
    if config.device.memory_gib is not None:
        return int(config.device.memory_gib * GIB)
    return None if is_joined(config) else device.smallest_device_memory(config.device.kind)


def peak_tflops(config: RunConfig) -> float | None:
    """Return a device's dense bf16 peak: `plan.peak_tflops`, else that of this host's devices.

    None = unknown, as for another machine or an unlisted device.
    """
    if config.plan.peak_tflops is not None or is_elsewhere(config):
        return config.plan.peak_tflops
    peak = device.lowest_peak(config.device.kind)
    return None if peak is None else peak / 1e12


def rollout_memory(config: RunConfig) -> int | None:
    """Return the bytes that a generating process may use; None = unknown.

    On CPU without `device.memory_gib`, generating ranks share the host memory equally (None on a
    joined cluster); otherwise each has its device.
    """
    if config.device.memory_gib is not None or not on_cpu(config):
        return device_memory(config)
    return None if is_joined(config) else device.host_memory() // config.rollout_layout.world_size


def host_memory(config: RunConfig) -> int | None:
    """Return a host's bytes: `plan.host_memory_gib`, else this host's; None if it is another."""
    if config.plan.host_memory_gib is not None:
        return int(config.plan.host_memory_gib * GIB)
    return None if is_elsewhere(config) else device.host_memory()


def free_disk(config: RunConfig) -> int | None:
    """Return the free bytes for the run: `plan.disk_gib`, else on the disk of its folder.

    None if the plan is for another machine.
    """
    if config.plan.disk_gib is not None:
        return int(config.plan.disk_gib * GIB)
    if is_elsewhere(config):
        return None
    return shutil.disk_usage(existing_folder(RunDirectory.choose(config).path)).free
