"""Which rank stands where: host x device -> rank and its parallel coordinates in each role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from mindspeed_rlxf.config.layout import ParallelLayout
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning.memory import is_split
from mindspeed_rlxf.reporting.table import table

Placed: TypeAlias = tuple[ParallelLayout, int]
"""A layout, and the rank of the pool that its first rank is."""

Layouts: TypeAlias = dict[str, Placed]
"""Those of roles, by name."""

MAX_LINES = 32  # with more devices than this, hosts that look alike share a line


@dataclass(frozen=True)
class Host:
    """Ranks of a pool, or of a part of it, on one host, and the device of the first of them."""

    index: int
    ranks: range
    first_device: int = 0

    @property
    def num_devices(self) -> int:
        return len(self.ranks)


def topology(config: RunConfig) -> str:
    """A table for each pool: a line for each device, or for each range of like hosts."""
    whole = sum(map(config.pool_size, config.resource_pool)) <= MAX_LINES
    parts = (part for pool in config.resource_pool for part in _parts(config, pool))
    return "\n\n".join(_table(*part, whole) for part in parts)


def _parts(config: RunConfig, pool: str) -> Iterator[tuple[str, list[Host], Layouts]]:
    """The pool's hosts and roles; where it is split those that train, then those that generate."""
    hosts = list(_hosts(config.resource_pool[pool]))
    layouts = {role.value: (config.layout(role), 0) for role in config.roles_of(pool)}
    if not is_split(config, pool) or config.parts is None:
        yield pool, hosts, layouts
        return
    first, size = config.parts[0], config.pool_size(pool)
    yield pool, _within(hosts, range(first)), layouts
    yield pool, _within(hosts, range(first, size)), {"rollout": (config.rollout_layout, first)}


def _within(hosts: list[Host], ranks: range) -> list[Host]:
    """What the hosts have of the ranks."""
    found = []
    for host in hosts:
        mine = [rank for rank in host.ranks if rank in ranks]
        if mine:
            device = host.first_device + mine[0] - host.ranks[0]
            found.append(Host(host.index, range(mine[0], mine[-1] + 1), device))
    return found


def _table(pool: str, hosts: list[Host], layouts: Layouts, whole: bool) -> str:
    rows: list[list[object]] = [
        ["pool", "hosts", "devices", "ranks", *(f"{role} TP,PP,DP" for role in layouts)]
    ]
    places = list(layouts.values())
    for group in _single_devices(hosts) if whole else _alike(hosts, places):
        rows.append(_line(pool, group, places))
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
        for number, rank in enumerate(host.ranks, host.first_device):
            yield _Group(
                range(host.index, host.index + 1),
                range(number, number + 1),
                range(rank, rank + 1),
            )


def _alike(hosts: list[Host], layouts: Sequence[Placed]) -> Iterator[_Group]:
    """Neighbouring hosts of one size that differ in their data-parallel ranks only."""

    def look(host: Host) -> tuple[object, ...]:
        places = [(_tp(layout, host.ranks), _pp(layout, host.ranks)) for layout in layouts]
        return host.num_devices, host.first_device, *places

    for _, group in groupby(hosts, look):
        members = list(group)
        yield _Group(
            range(members[0].index, members[-1].index + 1),
            range(members[0].first_device, members[0].first_device + members[0].num_devices),
            range(members[0].ranks[0], members[-1].ranks[-1] + 1),
        )


def _line(pool: str, group: _Group, layouts: Sequence[Placed]) -> list[object]:
    shown = [_span(list(part)) for part in (group.hosts, group.devices, group.ranks)]
    return [pool, *shown, *(_coordinates(layout, group.ranks) for layout in layouts)]


def _coordinates(placed: Placed, ranks: range) -> str:
    layout, first = placed
    dp = [layout.dp_rank(rank - first) for rank in ranks]
    return ",".join((_span(_tp(placed, ranks)), _span(_pp(placed, ranks)), _span(dp)))


def _tp(placed: Placed, ranks: range) -> tuple[int, ...]:
    layout, first = placed
    return tuple(sorted({layout.tp_rank(rank - first) for rank in ranks}))


def _pp(placed: Placed, ranks: range) -> tuple[int, ...]:
    layout, first = placed
    return tuple(sorted({layout.pp_rank(rank - first) for rank in ranks}))


def _span(numbers: list[int] | tuple[int, ...]) -> str:
    first, last = min(numbers), max(numbers)
    return str(first) if first == last else f"{first}-{last}"
