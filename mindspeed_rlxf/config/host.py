"""Whether this host can hold the processes that the configuration asks for.

Only for what starts here: the devices of a cluster that is joined are the runtime's to count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from mindspeed_rlxf.config.cluster import choose_cluster
from mindspeed_rlxf.config.enums import DeviceKind, RuntimeKind
from mindspeed_rlxf.config.schema import RunConfig

GIB = 1024**3
PROCESS_BYTES = GIB // 2
"""What one worker process takes before its model: interpreter, torch, Megatron."""


def check_host(config: RunConfig) -> list[str]:
    """Devices and memory that are missing here, each `rule, value, remedy`; empty when none."""
    if config.runtime.kind is RuntimeKind.LOCAL:
        return [*_local_world(config), *_devices(config, max(_pool_sizes(config).values()))]
    if joined_address(config):
        return list(_resource(config))
    return [*_resource(config), *_devices(config, sum(_pool_sizes(config).values()))]


def joined_address(config: RunConfig) -> str | None:
    """The Ray cluster to join; None = start an own one."""
    return choose_cluster(config.runtime.address).address


def _pool_sizes(config: RunConfig) -> dict[str, int]:
    return {pool: config.pool_size(pool) for pool in config.resource_pool}


def _local_world(config: RunConfig) -> Iterator[str]:
    """The local runtime runs every pool on the processes that torchrun started."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    for pool, size in _pool_sizes(config).items():
        if size != world:
            yield (
                f"resource_pool.{pool}={size} must equal the {world} processes of this run with "
                f"runtime.kind=local; use {world}, or start {size} with "
                f"torchrun --nproc-per-node {size}"
            )


def _resource(config: RunConfig) -> Iterator[str]:
    """Ray gives each worker a device of its own for its own resources only."""
    from mindspeed_rlxf import device

    kind, name = device.resolve_kind(config.device.kind), config.device.resource_name
    own = device.ray_resource(kind)
    if kind is not DeviceKind.CPU and name not in (None, own):
        yield (
            f"device.resource_name={name} must be {own} with device.kind={kind.value}, because Ray "
            f"hands out devices one by one for {own} only; remove it"
        )


def _devices(config: RunConfig, wanted: int) -> Iterator[str]:
    from mindspeed_rlxf import device

    kind = config.device.kind
    pools = ", ".join(f"{pool}={size}" for pool, size in _pool_sizes(config).items())
    try:
        kind = device.resolve_kind(kind)
        there = device.device_count(kind)
    except ValueError as error:
        yield str(error)
        return
    if kind is DeviceKind.CPU:
        yield from _cpu_memory(pools, wanted)
    elif there is not None and wanted > there:
        yield (
            f"resource_pool ({pools}) needs {wanted} {kind.value} devices and this host has "
            f"{there}; use fewer, put roles on one pool with placement, or join a cluster with "
            "runtime.address"
        )


def _cpu_memory(pools: str, wanted: int) -> Iterator[str]:
    from mindspeed_rlxf import device

    memory = device.host_memory()
    room = memory // PROCESS_BYTES
    if wanted > room:
        yield (
            f"resource_pool ({pools}) needs {wanted} processes of 0.5 GiB each and the memory of "
            f"this host, {memory / GIB:.1f} GiB, holds {room}; use {room} or fewer"
        )
