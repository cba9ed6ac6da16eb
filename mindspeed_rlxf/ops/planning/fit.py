"""Compare needed memory and disk with what is available: sections of the plan, and problems."""

from dataclasses import dataclass

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.config.problems import Problem
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning import available
from mindspeed_rlxf.ops.planning.host_memory import ALWAYS, PHASES, disk_needed, host_memory_needed
from mindspeed_rlxf.ops.planning.memory import PoolMemory, pool_memories
from mindspeed_rlxf.ops.planning.remedies import find_remedy
from mindspeed_rlxf.ops.planning.stage_memory import Phase, State
from mindspeed_rlxf.ops.sizes import format_bytes
from mindspeed_rlxf.reporting.table import pairs, table


@dataclass(frozen=True)
class Need:
    """Bytes wanted and available, and the fields of the problem if they do not fit.

    key, remedy: fields of the problem
    subject:     what needs the bytes, followed by a space; may be ""
    available:   None = unknown
    unknown:     why it is unknown
    """

    key: str
    subject: str
    wanted: int
    available: int | None
    remedy: str
    unknown: str = ""

    @property
    def problem(self) -> Problem | None:
        """Return the problem if more is wanted than available; None if it fits or is unknown."""
        if self.available is None or self.wanted <= self.available:
            return None
        rule = f"{self.subject}{self._sizes}"
        return Problem(self.key, rule, remedy=self.remedy, colon=bool(self.subject))

    @property
    def verdict(self) -> str:
        """Return the plan's line: sizes, and "fits", or "does not fit" with the remedy.

        If the available bytes are unknown: the wanted bytes, and why the others are unknown.
        """
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
    """Text of the plan's sections by title, and a problem for each need that does not fit."""

    sections: dict[str, str]
    problems: list[Problem]


def check_fit(config: RunConfig) -> Fit:
    """Compare the needs of a run with the memory of devices and hosts, and with the free disk.

    Returns a text per section (each pool and part, host memory, disk) and problems where a need is
    larger than what is there.
    """
    pools = [memory for pool in config.resource_pool for memory in pool_memories(config, pool)]
    sections: dict[str, tuple[str, Need]] = {}
    for pool in pools:
        part = f", {pool.part}" if pool.part else ""
        title = f"Memory per device, pool {pool.pool}{part} (rank {pool.rank}, which needs most)"
        there = available.device_memory(config)
        sections[title] = (
            table(_pool_rows(pool)),
            Need(
                f"resource_pool.{pool.pool}",
                f"a device {f'of the {pool.part} ' if pool.part else ''}",
                pool.total,
                there,
                "" if there is None or pool.total <= there else find_remedy(config, pool, there),
                "it comes from the host's memory, see below"
                if available.on_cpu(config)
                else "memory of a device is unknown: set device.memory_gib",
            ),
        )
    host = "Host memory" + (", largest host" if available.is_joined(config) else "")
    sections[host] = _host_section(config, pools)
    sections["Disk"] = _disk_section(config)
    texts = {title: f"{body}\n  {need.verdict}" for title, (body, need) in sections.items()}
    return Fit(texts, [need.problem for _, need in sections.values() if need.problem])


def _pool_rows(pool: PoolMemory) -> list[list[object]]:
    """Return a pool's memory table: titles, each phase of each role, then all roles together."""
    rows: list[list[object]] = [
        ["role", "phase", "weights", "gradients", "optimizer", "activations", "KV cache", "other",
         "sum"]
    ]  # fmt: skip
    for role in pool.roles:
        name, other = role.role.value, role.other
        rows += [_memory_row(name, role.on_device(phase), other, phase) for phase in role.phases]
    other = pool.process + sum(role.other for role in pool.roles)
    if pool.peak is None:
        return [*rows, _memory_row("together", State(0, 0, 0), other, Phase("-"))]
    return [*rows, _memory_row("together", pool.on_device(*pool.peak), other, pool.peak[1])]


def _memory_row(name: str, state: State, other: int, phase: Phase) -> list[object]:
    needs = [*state, phase.activations, phase.kv_cache, other + phase.other]
    return [name, phase.name, *map(format_bytes, [*needs, sum(needs)])]


def _host_section(config: RunConfig, pools: list[PoolMemory]) -> tuple[str, Need]:
    """Return the table of the host's memory, a row per part, a column per phase, and the need."""
    host = host_memory_needed(config, pools)
    rows: list[list[object]] = [["part", *PHASES]]
    for part in host.parts:
        sizes = [part.bytes if each in part.phases else 0 for each in ALWAYS]
        rows.append([part.name, *map(format_bytes, sizes)])
    rows.append(["together", *map(format_bytes, host.phases)])
    cache = (
        f"  page cache of the weights that are loaded: {format_bytes(host.page_cache)}, not in the "
        "sums, as the system gives it back"
    )
    remedy = "use fewer processes, smaller micro-batches, or more hosts"
    if host.offloads:
        remedy = f"offload less, {remedy}"
    unknown = "memory of the hosts of a cluster is unknown here"
    there = available.host_memory(config)
    need = Need("resource_pool", "the host ", host.total, there, remedy, unknown)
    return f"{table(rows)}\n{cache}", need


def _disk_section(config: RunConfig) -> tuple[str, Need]:
    sizes, folder = disk_needed(config), RunDirectory.choose(config).path
    key = f"training.output_dir={str(folder)!r}"
    remedy = "free some space, or set training.output_dir to another disk"
    need = Need(key, "", sum(sizes.values()), available.free_disk(folder), remedy)
    return pairs([(name, format_bytes(count)) for name, count in sizes.items()]), need
