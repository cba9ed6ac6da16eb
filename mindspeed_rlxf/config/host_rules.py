"""Rules about this host: its processes, devices, memory and megatron-core.

A dry run checks them after it has printed its plan. In a joined Ray cluster the runtime counts
devices later and compares each node's packages.
"""

import os
from collections.abc import Iterator

from packaging.version import Version

from mindspeed_rlxf.config import packages
from mindspeed_rlxf.config.architecture import SHARED_GROUPS_SINCE
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.problems import Problem, ref
from mindspeed_rlxf.config.schema import RoleConfig, RunConfig
from mindspeed_rlxf.config.section_rules import ROLLOUT_TP

GIB = 1024**3
PROCESS_BYTES = GIB // 2
"""One worker process's memory before its model: interpreter, torch, Megatron."""


def check_host(config: RunConfig) -> list[Problem]:
    """Return the problems with running on this host: `check_launch`, `check_devices`."""
    return [*check_launch(config), *check_devices(config)]


def check_launch(config: RunConfig) -> list[Problem]:
    """Return problems with the number of processes, the Ray resource and the kind of device."""
    from mindspeed_rlxf import device

    problems: list[Problem] = []
    kind = device.resolve_kind(config.device.kind)
    has_experts = config.actor_rollout.architecture.num_experts is not None
    if config.runs_vllm and has_experts and kind is DeviceKind.NPU:
        rule = "has not run with experts on NPU, whose weights vllm-ascend 0.23 transposes as it "
        rule += "wakes"
        problems.append(Problem("rollout.engine", rule, "vllm", "use native"))
    if config.rollout.first_rank_draws and kind is DeviceKind.NPU:
        rule = "gathers on one rank, which HCCL cannot"
        problems.append(Problem("rollout.first_rank_draws", rule, True, "use false"))
    if config.makes_decode_graphs and kind is not DeviceKind.CUDA:
        rule = f"needs CUDA, not {ref('device.kind')}={kind.value}"
        problems.append(Problem("rollout.decode_graphs", rule, True, "use false"))
    if config.runtime.kind == "local":
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        rule = f"must equal the {world_size} processes of this run with {ref('runtime.kind')}=local"
        for pool, num_per_node in config.resource_pool.items():
            size = sum(num_per_node)
            if size != world_size:
                remedy = f"use {world_size}, or torchrun --nproc-per-node {size}"
                problems.append(Problem(f"resource_pool.{pool}", rule, size, remedy))
        return problems
    name = config.device.resource_name
    expected_name = device.facts(kind).ray_resource
    if kind is not DeviceKind.CPU and name not in (None, expected_name):
        rule = f"must be {expected_name} with {ref('device.kind')}={kind.value}"
        problems.append(Problem("device.resource_name", rule, name, "remove it"))
    return problems


def check_devices(config: RunConfig) -> list[Problem]:
    """Return what this host lacks: a newer megatron-core, CANN, devices, or memory."""
    from mindspeed_rlxf import device

    problems = [*_check_shared_groups(config)]
    if config.joins_cluster:
        return problems  # the runtime counts devices of other hosts
    sizes = {pool: sum(num_per_node) for pool, num_per_node in config.resource_pool.items()}
    is_local = config.runtime.kind == "local"
    num_needed = max(sizes.values()) if is_local else sum(sizes.values())
    kind = device.resolve_kind(config.device.kind)
    unit = f"{kind.value} devices"
    try:
        num_present = device.device_count(kind)
    except ValueError as error:
        return [*problems, Problem("", str(error))]
    if kind is DeviceKind.CPU:
        unit = "processes of 0.5 GiB"
        num_present = device.host_memory() // PROCESS_BYTES
    if num_present is not None and num_needed > num_present:
        pools = ", ".join(f"{pool}={size}" for pool, size in sizes.items())
        rule = f"({pools}) needs {num_needed} {unit} and this host has {num_present}"
        remedy = "use fewer, put roles on one pool, or join a cluster with runtime.address"
        problems.append(Problem("resource_pool", rule, remedy=remedy))
    return problems


def _check_shared_groups(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each TP size above its model's key-value groups."""
    tp_sizes: list[tuple[str, int, RoleConfig]] = []
    for role in config.roles:
        section = config.role(role)
        if section.architecture is not None:
            key = f"{role.value}.tensor_model_parallel_size"
            tp_sizes.append((key, section.tensor_model_parallel_size, section))
    if config.rollout_tp != config.actor_rollout.tensor_model_parallel_size:
        tp_sizes.append((ROLLOUT_TP, config.rollout_tp, config.actor_rollout))
    sharing = [(key, tp, s) for key, tp, s in tp_sizes if tp > s.architecture.kv_heads]
    megatron_version = packages.version(packages.MEGATRON) if sharing else None
    if megatron_version is None or Version(megatron_version).release >= SHARED_GROUPS_SINCE:
        return
    since = ".".join(map(str, SHARED_GROUPS_SINCE))
    for key, tp, section in sharing:
        num_groups = section.architecture.kv_heads
        name = f"model.{section.model}.num_query_groups"
        rule = f"must be at most {ref(name)}={num_groups} with megatron-core {megatron_version}"
        yield Problem(key, rule, tp, f"use {num_groups} or less, or megatron-core {since}")
