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
    from mindspeed_rlxf import device

    sizes = {pool: sum(nodes) for pool, nodes in config.resource_pool.items()}
    problems, wanted = [*_check_shared_groups(config)], sum(sizes.values())
    is_local = config.runtime.kind == "local"
    if is_local:
        world, wanted = int(os.environ.get("WORLD_SIZE", "1")), max(sizes.values())
        rule = f"must equal the {world} processes of this run with {ref('runtime.kind')}=local"
        for pool, size in sizes.items():
            if size != world:
                remedy = f"use {world}, or torchrun --nproc-per-node {size}"
                problems.append(Problem(f"resource_pool.{pool}", rule, size, remedy))
    elif joined_address(config):
        wanted = 0  # the runtime counts devices of other hosts
    try:
        kind, name = device.resolve_kind(config.device.kind), config.device.resource_name
        found = device.device_count(kind) if wanted else None
    except ValueError as error:
        return [*problems, Problem("", str(error))]
    own, things = device.facts(kind).ray_resource, f"{kind.value} devices"
    if not is_local and kind is not DeviceKind.CPU and name not in (None, own):
        rule = f"must be {own} with {ref('device.kind')}={kind.value}"
        problems.append(Problem("device.resource_name", rule, name, "remove it"))
    if wanted and kind is DeviceKind.CPU:
        things, found = "processes of 0.5 GiB", device.host_memory() // PROCESS_BYTES
    if found is not None and wanted > found:
        pools = ", ".join(f"{pool}={size}" for pool, size in sizes.items())
        rule = f"({pools}) needs {wanted} {things} and this host has {found}"
        remedy = "use fewer, put roles on one pool, or join a cluster with runtime.address"
        problems.append(Problem("resource_pool", rule, remedy=remedy))
    return problems


def joined_address(config: RunConfig) -> str | None:
    """Return the address of the Ray cluster to join; None = the run starts one."""
    return choose_cluster(config.runtime.address).address


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
        rule = f"must be at most {limit} with megatron-core {found}"
        yield Problem(key, rule, tp, f"use {groups} or less, or megatron-core {since}")
