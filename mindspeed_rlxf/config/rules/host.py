"""Whether this host can hold the processes that the configuration asks for, and run their layout.

Devices are counted for what starts here only: those of a cluster that is joined are the runtime's
to count. Every node has the packages of this one, which the runtime checks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from packaging.version import Version

from mindspeed_rlxf import packages
from mindspeed_rlxf.config.cluster import choose_cluster
from mindspeed_rlxf.config.enums import DeviceKind, RuntimeKind
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.rules.split import ROLLOUT_TP
from mindspeed_rlxf.config.rules.tensor_parallel import SHARED_GROUPS_SINCE
from mindspeed_rlxf.config.schema import RunConfig

GIB = 1024**3
PROCESS_BYTES = GIB // 2
"""What one worker process takes before its model: interpreter, torch, Megatron."""


def check_host(config: RunConfig) -> list[Problem]:
    """What is missing here: devices, memory, a version of megatron-core; empty when nothing is."""
    problems = list(_shared_groups(config))
    if config.runtime.kind is RuntimeKind.LOCAL:
        problems += _local_world(config)
        return [*problems, *_devices(config, max(_pool_sizes(config).values()))]
    problems += _resource(config)
    if joined_address(config):
        return problems
    return [*problems, *_devices(config, sum(_pool_sizes(config).values()))]


def joined_address(config: RunConfig) -> str | None:
    """The Ray cluster to join; None = start an own one."""
    return choose_cluster(config.runtime.address).address


def _pool_sizes(config: RunConfig) -> dict[str, int]:
    return {pool: config.pool_size(pool) for pool in config.resource_pool}


def _local_world(config: RunConfig) -> Iterator[Problem]:
    """The local runtime runs every pool on the processes that torchrun started."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    for pool, size in _pool_sizes(config).items():
        if size != world:
            yield Problem(
                f"resource_pool.{pool}",
                f"must equal the {world} processes of this run with {ref('runtime.kind')}=local",
                size,
                f"use {world}, or start {size} with torchrun --nproc-per-node {size}",
            )


def _shared_groups(config: RunConfig) -> Iterator[Problem]:
    """More tensor-parallel ranks than key-value groups need a megatron-core that shares a group."""
    sizes = [
        (f"{role.value}.tensor_model_parallel_size", section.tensor_model_parallel_size, section)
        for role in config.roles
        if (section := config.role(role)).architecture is not None
    ]
    if config.rollout_tp != config.actor_rollout.tensor_model_parallel_size:
        sizes.append((ROLLOUT_TP, config.rollout_tp, config.actor_rollout))
    shared = [(key, tp, s) for key, tp, s in sizes if tp > s.architecture.kv_heads]
    found = packages.version(packages.MEGATRON) if shared else None
    if found is None or Version(found).release >= SHARED_GROUPS_SINCE:
        return
    since = ".".join(map(str, SHARED_GROUPS_SINCE))
    for key, tp, section in shared:
        groups = section.architecture.kv_heads
        limit = f"{ref(f'model.{section.model}.num_query_groups')}={groups}"
        yield Problem(
            key,
            f"must be at most {limit} with megatron-core {found}, which gives every rank whole "
            "key-value groups",
            tp,
            f"use {groups} or less, or megatron-core {since}",
        )


def _resource(config: RunConfig) -> Iterator[Problem]:
    """Ray gives each worker a device of its own for its own resources only."""
    from mindspeed_rlxf import device

    kind, name = device.resolve_kind(config.device.kind), config.device.resource_name
    own = device.ray_resource(kind)
    if kind is not DeviceKind.CPU and name not in (None, own):
        yield Problem(
            "device.resource_name",
            f"must be {own} with {ref('device.kind')}={kind.value}, because Ray hands out devices "
            f"one by one for {own} only",
            name,
            "remove it",
        )


def _devices(config: RunConfig, wanted: int) -> Iterator[Problem]:
    from mindspeed_rlxf import device

    kind = config.device.kind
    pools = ", ".join(f"{pool}={size}" for pool, size in _pool_sizes(config).items())
    try:
        kind = device.resolve_kind(kind)
        there = device.device_count(kind)
    except ValueError as error:
        yield Problem("", str(error))
        return
    if kind is DeviceKind.CPU:
        yield from _cpu_memory(pools, wanted)
    elif there is not None and wanted > there:
        yield Problem(
            "resource_pool",
            f"({pools}) needs {wanted} {kind.value} devices and this host has {there}",
            remedy="use fewer, put roles on one pool with placement, or join a cluster with "
            "runtime.address",
        )


def _cpu_memory(pools: str, wanted: int) -> Iterator[Problem]:
    from mindspeed_rlxf import device

    memory = device.host_memory()
    room = memory // PROCESS_BYTES
    if wanted > room:
        yield Problem(
            "resource_pool",
            f"({pools}) needs {wanted} processes of 0.5 GiB each and the memory of this host, "
            f"{memory / GIB:.1f} GiB, holds {room}",
            remedy=f"use {room} or fewer",
        )
