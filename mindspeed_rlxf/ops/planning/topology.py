"""Tabulate the placement of ranks: host and device -> rank, and its coordinates in each role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

from mindspeed_rlxf.config.layout import ParallelLayout
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning.stage import is_split
from mindspeed_rlxf.reporting.table import table

Place: TypeAlias = tuple[int, int, int]
"""Host, device of the host, rank of the pool."""
Placed: TypeAlias = tuple[ParallelLayout, int]
"""A layout, and the rank of the pool that its first rank is."""

MAX_LINES = 32  # with more devices, hosts with the same layout share a line


def topology(config: RunConfig) -> str:
    """Return a table per pool as text, two for a split pool: of ranks that train and that generate.

    A line per device; over MAX_LINES devices in all, a line per range of hosts with equal layout.
    """
    whole = sum(map(config.pool_size, config.resource_pool)) <= MAX_LINES
    return "\n\n".join(
        _table(pool, places, layouts, whole)
        for pool in config.resource_pool
        for places, layouts in _pool_parts(config, pool)
    )


def _pool_parts(config: RunConfig, pool: str) -> Iterator[tuple[list[Place], dict[str, Placed]]]:
    """Yield the places of a pool's ranks and the layouts by role, for each part of the pool."""
    sizes = enumerate(config.resource_pool[pool])
    devices = [(host, number) for host, size in sizes for number in range(size)]
    places = [(*device, rank) for rank, device in enumerate(devices)]
    layouts = {role.value: (config.layout(role), 0) for role in config.roles_of(pool)}
    if not is_split(config, pool) or config.parts is None:
        yield places, layouts
        return
    first = config.parts[0]
    yield places[:first], layouts
    yield places[first:], {"rollout": (config.rollout_layout, first)}


def _table(pool: str, places: list[Place], layouts: dict[str, Placed], whole: bool) -> str:
    """Return the table of a pool; whole: with a line per device, else per range of like hosts."""
    rows: list[list[object]] = [
        ["pool", "hosts", "devices", "ranks", *(f"{role} TP,PP,DP" for role in layouts)]
    ]
    placed = list(layouts.values())
    for group in [[place] for place in places] if whole else _like_hosts(places, placed):
        spans = [_span(numbers) for numbers in zip(*group, strict=True)]
        ranks = [rank for _, _, rank in group]
        coordinates = (",".join(map(_span, _coordinates(each, ranks))) for each in placed)
        rows.append([pool, *spans, *coordinates])
    return table(rows)


def _like_hosts(places: list[Place], placed: Sequence[Placed]) -> Iterator[list[Place]]:
    def likeness(host: list[Place]) -> tuple[object, ...]:
        ranks = [rank for _, _, rank in host]
        devices = [device for _, device, _ in host]
        return devices, *(_coordinates(each, ranks)[:2] for each in placed)

    hosts = [list(host) for _, host in groupby(places, lambda place: place[0])]
    for _, group in groupby(hosts, likeness):
        yield [place for host in group for place in host]


def _coordinates(placed: Placed, ranks: list[int]) -> list[list[int]]:
    layout, first = placed
    functions = (layout.tp_rank, layout.pp_rank, layout.dp_rank)
    return [[function(rank - first) for rank in ranks] for function in functions]


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"
