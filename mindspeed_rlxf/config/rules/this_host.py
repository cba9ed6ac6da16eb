"""Check that this host has the devices, the memory and the packages that the configuration needs.

Only for processes that start on this host. For a Ray cluster that is joined, the runtime counts
devices later, and checks that every node has the same packages.
"""

import os
from collections.abc import Iterator

from packaging.version import Version

from mindspeed_rlxf.config import packages
from mindspeed_rlxf.config.architecture import SHARED_GROUPS_SINCE
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.problems import Problem, ref
from mindspeed_rlxf.config.ray_cluster import choose_cluster
from mindspeed_rlxf.config.rules.between_sections import ROLLOUT_TP
from mindspeed_rlxf.config.schema import RunConfig

GIB = 1024**3
PROCESS_BYTES = GIB // 2
"""Memory of one worker process before its model: interpreter, torch, Megatron."""


def check_host(config: RunConfig) -> list[Problem]:
    """Return problems of this host: an old megatron-core, and missing devices or memory."""
    sizes = {pool: config.pool_size(pool) for pool in config.resource_pool}
    problems = [*_check_shared_groups(config)]
    if config.runtime.kind == "local":
        problems += [
            *_check_local_world(sizes),
            *_check_devices(config, sizes, max(sizes.values())),
        ]
        return problems
    problems += _check_resource(config)
    if not joined_address(config):
        problems += _check_devices(config, sizes, sum(sizes.values()))
    return problems


def joined_address(config: RunConfig) -> str | None:
    """Return the address of the Ray cluster to join; None = the run starts one."""
    return choose_cluster(config.runtime.address).address


def _check_local_world(sizes: dict[str, int]) -> Iterator[Problem]:
    """Yield a problem for each pool whose size is not torchrun's WORLD_SIZE (unset = 1)."""
    found = os.environ.get("WORLD_SIZE", "1")
    if not (found.isascii() and found.isdigit() and int(found)):
        yield Problem(
            "WORLD_SIZE",
            "must be the number of processes that torchrun started, 1 or more",
            repr(found),
            "unset it, or start the processes with torchrun",
        )
        return
    world = int(found)
    for pool, size in sizes.items():
        if size != world:
            yield Problem(
                f"resource_pool.{pool}",
                f"must equal the {world} processes of this run with {ref('runtime.kind')}=local",
                size,
                f"use {world}, or start {size} with torchrun --nproc-per-node {size}",
            )


def _check_shared_groups(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each TP above its model's number of key-value groups."""
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


def _check_resource(config: RunConfig) -> Iterator[Problem]:
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


def _check_devices(config: RunConfig, sizes: dict[str, int], wanted: int) -> Iterator[Problem]:
    """Yield at most one problem, if this host has too little for `wanted` processes."""
    from mindspeed_rlxf import device

    pools = ", ".join(f"{pool}={size}" for pool, size in sizes.items())
    try:
        kind = device.resolve_kind(config.device.kind)
        found = device.device_count(kind)
    except ValueError as error:
        yield Problem("", str(error))
        return
    memory = device.host_memory() if kind is DeviceKind.CPU else 0
    room = memory // PROCESS_BYTES
    if kind is DeviceKind.CPU and wanted > room:
        yield Problem(
            "resource_pool",
            f"({pools}) needs {wanted} processes of 0.5 GiB each and the memory of this host, "
            f"{memory / GIB:.1f} GiB, holds {room}",
            remedy=f"use {room} or fewer",
        )
    elif kind is not DeviceKind.CPU and found is not None and wanted > found:
        yield Problem(
            "resource_pool",
            f"({pools}) needs {wanted} {kind.value} devices and this host has {found}",
            remedy="use fewer, put roles on one pool with placement, or join a cluster with "
            "runtime.address",
        )
