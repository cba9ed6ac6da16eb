"""Needs against what there is: the sections of the plan, and a problem for each that is too big."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.config.rules.host import GIB
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning import available
from mindspeed_rlxf.ops.planning.host import disk_needed, host_memory_needed
from mindspeed_rlxf.ops.planning.memory import (
    GENERATES,
    Phase,
    PoolMemory,
    RoleMemory,
    optimizer_of,
    pool_memories,
)
from mindspeed_rlxf.reporting.table import pairs, table
from mindspeed_rlxf.run.directory import RunDirectory

MIB = 1024**2


@dataclass(frozen=True)
class Need:
    """Bytes wanted and there; None = unknown, for the reason `unknown`. The others are parts of
    the problem."""

    key: str
    what: str
    wanted: int
    there: int | None
    remedy: str
    unknown: str

    @property
    def problem(self) -> Problem | None:
        if self.there is None or self.wanted <= self.there:
            return None
        return Problem(
            self.key,
            f"{self.what}needs {size(self.wanted)}, has {size(self.there)}",
            remedy=self.remedy,
            colon=bool(self.what),
        )

    @property
    def verdict(self) -> str:
        if self.there is None:
            return f"needs {size(self.wanted)}; {self.unknown}"
        if self.wanted <= self.there:
            return f"fits: needs {size(self.wanted)}, has {size(self.there)}"
        return f"does not fit: needs {size(self.wanted)}, has {size(self.there)}; {self.remedy}"


@dataclass(frozen=True)
class Fit:
    """Sections of the plan, by title, and what does not fit."""

    sections: dict[str, str]
    problems: list[Problem]


def fit(config: RunConfig) -> Fit:
    """Memory of devices and hosts, and disk."""
    pools = [need for pool in config.resource_pool for need in pool_memories(config, pool)]
    sections, needs = {}, []
    for pool in pools:
        need = _device_need(config, pool)
        part = f", {pool.part}" if pool.part else ""
        title = f"Memory per device, pool {pool.pool}{part} (rank {pool.rank}, which needs most)"
        sections[title] = f"{table(_pool_rows(pool))}\n  {need.verdict}"
        needs.append(need)
    for title, (rows, need) in _elsewhere(config, pools).items():
        sections[title] = f"{pairs(rows)}\n  {need.verdict}"
        needs.append(need)
    return Fit(sections, [need.problem for need in needs if need.problem])


def size(count: int) -> str:
    """Bytes for people: GiB, MiB when small."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / MIB:.1f} MiB" if count else "0"


def _pool_rows(pool: PoolMemory) -> list[list[object]]:
    """A line for each phase of each role, and one for all together."""
    rows: list[list[object]] = [
        ["role", "phase", "weights", "gradients", "optimizer", "activations", "KV cache", "other",
         "sum"]
    ]  # fmt: skip
    for role in pool.roles:
        rows += [_line(role.role.value, [role], role.other, phase) for phase in role.phases]
    other = pool.process + sum(role.other for role in pool.roles)
    phase = pool.busiest.largest if pool.busiest else Phase("-")
    return [*rows, _line("together", pool.roles, other, phase)]


def _line(name: str, roles: Sequence[RoleMemory], other: int, phase: Phase) -> list[object]:
    """What `roles` and `other` hold while `phase` runs."""
    kept = [sum(values) for values in zip(*(role.state for role in roles), strict=True)]
    kept = kept or [0, 0, 0]
    needs = [*kept, phase.activations, phase.kv_cache, other + phase.other]
    return [name, phase.name, *map(size, [*needs, sum(needs)])]


def _device_need(config: RunConfig, pool: PoolMemory) -> Need:
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
    """What lowers the largest part."""
    busiest = pool.busiest
    if busiest is None or sum(sum(role.state) for role in pool.roles) > busiest.largest.total:
        return " or ".join(_ways_to_spread(config, pool))
    if busiest.largest.name == "generate":
        return f"lower {busiest.role.value}.num_samples_per_step"
    by_tokens = config.role(busiest.role).max_tokens_per_micro_batch is not None
    key = "max_tokens_per_micro_batch" if by_tokens else "micro_batch_size"
    return f"lower {busiest.role.value}.{key}"


def _ways_to_spread(config: RunConfig, pool: PoolMemory) -> Iterator[str]:
    """Fewer weights, gradients and optimizer slots on a rank."""
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
        yield "place roles on pools of their own"


def _elsewhere(
    config: RunConfig, pools: list[PoolMemory]
) -> dict[str, tuple[list[tuple[str, object]], Need]]:
    """Title -> lines and need of what is not on a device."""
    host, disk = host_memory_needed(config, pools), disk_needed(config)
    folder = RunDirectory.choose(config).path
    memory_rows: list[tuple[str, object]] = [
        (f"processes ({host.num_processes})", size(host.processes)),
        ("driver", size(host.driver)),
        ("rows of an iteration, and of the one before", size(host.rows)),
        ("final weights while they are written", size(host.export)),
    ]
    if host.devices:
        memory_rows.append(("what the roles hold", size(host.devices)))
    disk_rows: list[tuple[str, object]] = [
        (f"final weights of {role.value}", size(count)) for role, count in disk.exports.items()
    ]
    count = disk.num_checkpoints
    disk_rows.append((f"checkpoints ({count}, one being written)", size(count * disk.checkpoint)))
    title = "Host memory" + (", largest host" if available.is_joined(config) else "")
    return {
        title: (
            memory_rows,
            Need(
                "resource_pool",
                "the host ",
                host.total,
                available.host_memory(config),
                "use fewer processes, smaller micro-batches, or more hosts",
                "memory of the hosts of a cluster is unknown here",
            ),
        ),
        "Disk": (
            disk_rows,
            Need(
                f"training.output_dir={str(folder)!r}",
                "",
                disk.total,
                available.free_disk(folder),
                "free some space, or set training.output_dir to another disk",
                "",
            ),
        ),
    }
