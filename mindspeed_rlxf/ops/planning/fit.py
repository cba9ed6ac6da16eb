"""Compare required with available memory and disk: plan sections, and problems."""

from collections.abc import Iterator
from dataclasses import replace

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.config.problems import Problem
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning import available
from mindspeed_rlxf.ops.planning.host_memory import (
    PHASES,
    HostMemory,
    disk_needed,
    host_memory_needed,
)
from mindspeed_rlxf.ops.planning.memory import PoolMemory, pool_memories
from mindspeed_rlxf.ops.planning.stage_memory import Phase, State
from mindspeed_rlxf.ops.sizes import format_bytes
from mindspeed_rlxf.reporting.table import NONE, named_table, pairs, table


def check_fit(config: RunConfig) -> tuple[dict[str, str], list[Problem]]:
    """Compare a run's needs with device memory, host memory and free disk.

    Returns:
        A section for each pool and part, host memory and disk, by title; and a problem for each
        unmet need.
    """
    sections: dict[str, str] = {}
    problems: list[Problem] = []

    def compare(
        title: str, body: str, needed: int, existing: int | None, unknown: str, problem: Problem
    ) -> None:
        sizes = f"needs {format_bytes(needed)}"
        verdict = f"{sizes}; {unknown}"
        if existing is not None:
            sizes += f", has {format_bytes(existing)}"
            verdict = f"fits: {sizes}"
            if needed > existing:
                verdict = f"does not fit: {sizes}; {problem.remedy}"
                rule = f"{problem.rule}{sizes}"
                problems.append(replace(problem, rule=rule, colon=bool(problem.rule)))
        sections[title] = f"{body}\n  {verdict}"

    pools = pool_memories(config)
    for pool in pools:
        title = f"Memory per device, pool {pool.pool}"
        subject = "a device "
        if pool.ranks:
            title += f", {pool.ranks}"
            subject += f"of the {pool.ranks} "
        compare(
            f"{title} (rank {pool.rank}, which needs most)",
            named_table([*_pool_rows(pool)]),
            pool.total,
            available.device_memory(config),
            "it comes from the host's memory, see below"
            if available.on_cpu(config)
            else "memory of a device is unknown: set device.memory_gib",
            Problem(
                f"resource_pool.{pool.pool}",
                subject,
                remedy=(
                    "set offload, recompute, use_distributed_optimizer or (backend fsdp) "
                    "reduce_each_micro_batch, lower "
                    "num_samples_per_step, micro_batch_size or max_tokens_per_micro_batch, raise "
                    "tensor_model_parallel_size, or use more devices; plan.suggest=true looks for "
                    "layouts that fit"
                ),
            ),
        )
    host = host_memory_needed(config, pools)
    remedy = "offload less, use fewer processes, smaller micro-batches, or more hosts"
    compare(
        "Host memory" + (", largest host" if available.is_joined(config) else ""),
        _host_table(host),
        host.total,
        available.host_memory(config),
        "memory of a host is unknown: set plan.host_memory_gib",
        Problem("resource_pool", "the host ", remedy=remedy),
    )
    folder = RunDirectory.choose(config).path
    disk = disk_needed(config)
    remedy = "free some space, or set training.output_dir to another disk"
    compare(
        "Disk",
        pairs([(name, format_bytes(count)) for name, count in disk.items()]),
        sum(disk.values()),
        available.free_disk(config),
        "the space on its disk is unknown: set plan.disk_gib",
        Problem(f"training.output_dir={str(folder)!r}", "", remedy=remedy),
    )
    return sections, problems


def _pool_rows(pool: PoolMemory) -> Iterator[dict[str, object]]:
    """Yield a pool's memory: each role's phases, then all roles together."""
    for role in pool.roles:
        for phase in role.phases:
            yield _memory_row(role.role.value, role.on_device(phase), role.other, phase)
    lasting = pool.process + sum(role.other for role in pool.roles)
    if pool.peak is None:
        yield _memory_row("together", State(0, 0, 0), lasting, Phase(NONE))
    else:
        _, phase = pool.peak
        yield _memory_row("together", pool.on_device(*pool.peak), lasting, phase)


def _memory_row(name: str, state: State, lasting: int, phase: Phase) -> dict[str, object]:
    """Return a row of the table; `lasting` are bytes beside the state that outlast phases."""
    sizes = state._asdict()
    sizes["activations"] = phase.activations
    sizes["KV cache"] = phase.kv_cache
    sizes["other"] = lasting + phase.other
    sizes["sum"] = sum(sizes.values())
    columns = {title: format_bytes(size) for title, size in sizes.items()}
    return {"role": name, "phase": phase.name, **columns}


def _host_table(host: HostMemory) -> str:
    """Build the host memory table: a row per part, a column per phase."""
    rows: list[list[object]] = [["part", *PHASES]]
    for consumer in host.consumers:
        sizes = [consumer.bytes if phase in consumer.phases else 0 for phase in PHASES]
        rows.append([consumer.name, *map(format_bytes, sizes)])
    rows.append(["together", *map(format_bytes, host.phases)])
    return (
        f"{table(rows)}\n  page cache of the weights that are loaded: "
        f"{format_bytes(host.page_cache)}, not in the sums, as the system gives it back"
    )
