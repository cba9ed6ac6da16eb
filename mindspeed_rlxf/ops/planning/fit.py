"""Compare needs with what is available: sections of the plan, and a problem for each excess."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning import available
from mindspeed_rlxf.ops.planning.host import disk_needed, host_memory_needed
from mindspeed_rlxf.ops.planning.memory import (
    GENERATES,
    Phase,
    PoolMemory,
    State,
    optimizer_of,
    pool_memories,
)
from mindspeed_rlxf.ops.sizes import format_bytes
from mindspeed_rlxf.reporting.table import pairs, table
from mindspeed_rlxf.run.directory import RunDirectory


@dataclass(frozen=True)
class Need:
    """Bytes wanted and available, with the parts of the problem where they are too few.

    key, remedy: of the problem
    subject:     what needs the bytes, with a space behind it; may be empty
    available:   None = unknown, for the reason `unknown`
    """

    key: str
    subject: str
    wanted: int
    available: int | None
    remedy: str
    unknown: str = ""

    @property
    def problem(self) -> Problem | None:
        """The problem when more is wanted than available; None = it fits, or that is not known."""
        if self.available is None or self.wanted <= self.available:
            return None
        rule = f"{self.subject}{self._sizes}"
        return Problem(self.key, rule, remedy=self.remedy, colon=bool(self.subject))

    @property
    def verdict(self) -> str:
        """A line for the plan: it fits, or does not and what to change, or what is not known."""
        if self.available is None:
            return f"{self._sizes}; {self.unknown}"
        if self.problem is None:
            return f"fits: {self._sizes}"
        return f"does not fit: {self._sizes}; {self.remedy}"

    @property
    def _sizes(self) -> str:
        needs = f"needs {format_bytes(self.wanted)}"
        return needs if self.available is None else f"{needs}, has {format_bytes(self.available)}"


@dataclass(frozen=True)
class Fit:
    """Sections of the plan, by title, and what does not fit."""

    sections: dict[str, str]
    problems: list[Problem]


def check_fit(config: RunConfig) -> Fit:
    """Compare needs with the memory of devices and hosts, and with free disk; return the tables."""
    pools = [memory for pool in config.resource_pool for memory in pool_memories(config, pool)]
    sections: dict[str, tuple[str, Need]] = {}
    for pool in pools:
        part = f", {pool.part}" if pool.part else ""
        title = f"Memory per device, pool {pool.pool}{part} (rank {pool.rank}, which needs most)"
        sections[title] = table(_pool_rows(pool)), _device_need(config, pool)
    host = "Host memory" + (", largest host" if available.is_joined(config) else "")
    sections[host] = _host_section(config, pools)
    sections["Disk"] = _disk_section(config)
    texts = {title: f"{body}\n  {need.verdict}" for title, (body, need) in sections.items()}
    return Fit(texts, [need.problem for _, need in sections.values() if need.problem])


def _pool_rows(pool: PoolMemory) -> list[list[object]]:
    """Make the table of a pool's memory: a row for each phase of each role, and one for all."""
    rows: list[list[object]] = [
        ["role", "phase", "weights", "gradients", "optimizer", "activations", "KV cache", "other",
         "sum"]
    ]  # fmt: skip
    for role in pool.roles:
        name, other = role.role.value, role.other
        rows += [_row(name, role.held(phase), other, phase) for phase in role.phases]
    other = pool.process + sum(role.other for role in pool.roles)
    if pool.peak is None:
        return [*rows, _row("together", (0, 0, 0), other, Phase("-"))]
    return [*rows, _row("together", pool.held(*pool.peak), other, pool.peak[1])]


def _row(name: str, held: State, other: int, phase: Phase) -> list[object]:
    """Make a row of the memory table: what is held while `phase` runs."""
    needs = [*held, phase.activations, phase.kv_cache, other + phase.other]
    return [name, phase.name, *map(format_bytes, [*needs, sum(needs)])]


def _device_need(config: RunConfig, pool: PoolMemory) -> Need:
    """Compare the memory that a rank of the pool wants with a device's."""
    return Need(
        f"resource_pool.{pool.pool}",
        f"a device {f'of the {pool.part} ' if pool.part else ''}",
        pool.total,
        available.device_memory(config),
        _remedy(config, pool),
        "it comes from the host's memory, see below"
        if available.on_cpu(config)
        else "memory of a device is unknown: set device.memory_gib",
    )


def _remedy(config: RunConfig, pool: PoolMemory) -> str:
    """Name the change that lowers the largest part of a pool's memory."""
    if pool.peak is None or sum(pool.held(*pool.peak)) > pool.peak[1].total:
        return " or ".join(_ways_to_spread(config, pool))
    busiest, phase = pool.peak
    if phase.name == "generate":
        return f"lower {busiest.role.value}.num_samples_per_step"
    by_tokens = config.role(busiest.role).max_tokens_per_micro_batch is not None
    key = "max_tokens_per_micro_batch" if by_tokens else "micro_batch_size"
    return f"lower {busiest.role.value}.{key}"


def _ways_to_spread(config: RunConfig, pool: PoolMemory) -> Iterator[str]:
    """Yield changes that leave fewer weights, gradients and optimizer slots on a rank."""
    if pool.part == GENERATES:
        yield "raise rollout.tensor_model_parallel_size"
        return
    for role in pool.roles:
        optimizer = optimizer_of(config, role.role)
        whole = optimizer is not None and not optimizer.use_distributed_optimizer
        if whole and config.layout(role.role).dp > 1:
            yield f"set {role.role.value}.use_distributed_optimizer=true"
    for role in pool.roles:
        section = config.role(role.role)
        ep, dp = section.expert_model_parallel_size, config.layout(role.role).dp
        experts = section.architecture.num_experts if section.architecture else None
        if experts and gcd(experts, dp) > ep:
            yield f"raise {role.role.value}.expert_model_parallel_size"
    yield "raise tensor_model_parallel_size"
    yield "raise pipeline_model_parallel_size"
    if len(pool.roles) > 1:
        yield from _ways_to_offload(pool)
        yield "place roles on pools of their own"


def _ways_to_offload(pool: PoolMemory) -> Iterator[str]:
    """Yield the keys that would move parts of roles to the host while others compute."""
    if any(role.optimizer and not role.offload.optimizer for role in pool.roles):
        yield "set training.offload.optimizer=true"
    if not all(role.offload.weights for role in pool.roles):
        yield "set training.offload.weights=true"


def _host_section(config: RunConfig, pools: list[PoolMemory]) -> tuple[str, Need]:
    """Return the table of the host's memory, and whether it fits."""
    host = host_memory_needed(config, pools)
    rows = {
        f"processes ({host.num_processes})": host.processes,
        "driver": host.driver,
        "rows of an iteration, and of the one before": host.rows,
        "a checkpoint while it is written": host.checkpoint,
        "final weights while they are written": host.export,
    }
    if host.offloaded:
        rows["copies of what roles offload"] = host.offloaded
    if host.devices:
        rows["what the roles hold"] = host.devices
    remedy = "use fewer processes, smaller micro-batches, or more hosts"
    unknown = "memory of the hosts of a cluster is unknown here"
    there = available.host_memory(config)
    need = Need("resource_pool", "the host ", host.total, there, remedy, unknown)
    return _rows(rows), need


def _disk_section(config: RunConfig) -> tuple[str, Need]:
    """Return the table of the disk that the run needs, and whether it fits."""
    disk, folder = disk_needed(config), RunDirectory.choose(config).path
    rows = {f"final weights of {role.value}": count for role, count in disk.exports.items()}
    checkpoints = f"checkpoints ({disk.num_checkpoints}, one being written)"
    rows[checkpoints] = disk.num_checkpoints * disk.checkpoint
    key = f"training.output_dir={str(folder)!r}"
    remedy = "free some space, or set training.output_dir to another disk"
    return _rows(rows), Need(key, "", disk.total, available.free_disk(folder), remedy)


def _rows(sizes: dict[str, int]) -> str:
    return pairs([(name, format_bytes(count)) for name, count in sizes.items()])
