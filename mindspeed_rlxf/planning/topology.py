"""Which rank stands where: host x device -> rank and its parallel coordinates in each role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from mindspeed_rlxf.config.layout import ParallelLayout
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.table import table

MAX_LINES = 32  # with more devices than this, hosts that look alike share a line


@dataclass(frozen=True)
class Host:
    """Ranks of a pool on one host, its devices 0 .. count - 1."""

    index: int
    ranks: range

    @property
    def num_devices(self) -> int:
        return len(self.ranks)


def topology(config: RunConfig) -> str:
    """A table for each pool: a line for each device, or for each range of like hosts."""
    whole = sum(map(config.pool_size, config.resource_pool)) <= MAX_LINES
    return "\n\n".join(_pool(config, pool, whole) for pool in config.resource_pool)


def _pool(config: RunConfig, pool: str, whole: bool) -> str:
    layouts = {role.value: config.layout(role) for role in config.roles_of(pool)}
    rows: list[list[object]] = [
        ["pool", "hosts", "devices", "ranks", *(f"{role} TP,PP,DP" for role in layouts)]
    ]
    hosts = list(_hosts(config.resource_pool[pool]))
    for group in _single_devices(hosts) if whole else _alike(hosts, list(layouts.values())):
        rows.append(_line(pool, group, list(layouts.values())))
    return table(rows)


def _hosts(sizes: list[int]) -> Iterator[Host]:
    first = 0
    for index, size in enumerate(sizes):
        yield Host(index, range(first, first + size))
        first += size


@dataclass(frozen=True)
class _Group:
    """What one line of the table stands for: some devices of consecutive hosts."""

    hosts: range
    devices: range
    ranks: range


def _single_devices(hosts: list[Host]) -> Iterator[_Group]:
    for host in hosts:
        for number, rank in enumerate(host.ranks):
            yield _Group(
                range(host.index, host.index + 1),
                range(number, number + 1),
                range(rank, rank + 1),
            )


def _alike(hosts: list[Host], layouts: list[ParallelLayout]) -> Iterator[_Group]:
    """Neighbouring hosts of one size that differ in their data-parallel ranks only."""

    def look(host: Host) -> tuple[object, ...]:
        places = [(_tp(layout, host.ranks), _pp(layout, host.ranks)) for layout in layouts]
        return host.num_devices, *places

    for _, group in groupby(hosts, look):
        members = list(group)
        yield _Group(
            range(members[0].index, members[-1].index + 1),
            range(members[0].num_devices),
            range(members[0].ranks[0], members[-1].ranks[-1] + 1),
        )


def _line(pool: str, group: _Group, layouts: list[ParallelLayout]) -> list[object]:
    shown = [_span(list(part)) for part in (group.hosts, group.devices, group.ranks)]
    return [pool, *shown, *(_coordinates(layout, group.ranks) for layout in layouts)]


def _coordinates(layout: ParallelLayout, ranks: range) -> str:
    dp = [layout.dp_rank(rank) for rank in ranks]
    return ",".join((_span(_tp(layout, ranks)), _span(_pp(layout, ranks)), _span(dp)))


def _tp(layout: ParallelLayout, ranks: range) -> tuple[int, ...]:
    return tuple(sorted({layout.tp_rank(rank) for rank in ranks}))


def _pp(layout: ParallelLayout, ranks: range) -> tuple[int, ...]:
    return tuple(sorted({layout.pp_rank(rank) for rank in ranks}))


def _span(numbers: list[int] | tuple[int, ...]) -> str:
    first, last = min(numbers), max(numbers)
    return str(first) if first == last else f"{first}-{last}"
