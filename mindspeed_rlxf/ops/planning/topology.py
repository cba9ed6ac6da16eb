"""Tabulate the placement of ranks: host and device -> rank, and its coordinates in each role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TypeAlias

from mindspeed_rlxf.config.layout import ParallelLayout
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning.pipeline_stage import is_split
from mindspeed_rlxf.reporting.table import table

Placed: TypeAlias = tuple[ParallelLayout, int]
"""A layout, and the rank of the pool that its first rank is."""

MAX_LINES = 32  # with more devices, hosts with the same layout share a line


@dataclass(frozen=True)
class Block:
    """Consecutive ranks of a pool on the same device numbers of each host in a range.

    hosts, devices, ranks: numbers; ranks count within the pool
    """

    hosts: range
    devices: range
    ranks: range


def topology(config: RunConfig) -> str:
    """Return a table per pool as text, two for a split pool: of ranks that train and that generate.

    A line per device; over MAX_LINES devices in all, a line per range of hosts with equal layout.
    """
    whole = sum(map(config.pool_size, config.resource_pool)) <= MAX_LINES
    return "\n\n".join(
        _table(pool, blocks, layouts, whole)
        for pool in config.resource_pool
        for blocks, layouts in _pool_parts(config, pool)
    )


def _pool_parts(config: RunConfig, pool: str) -> Iterator[tuple[list[Block], dict[str, Placed]]]:
    """Yield (hosts, layouts) of a pool; of a split one for ranks that train, then that generate.

    layouts: role name, or "rollout" for ranks that only generate -> the layout and its first rank
             in the pool
    """
    hosts = _host_blocks(config.resource_pool[pool])
    layouts = {role.value: (config.layout(role), 0) for role in config.roles_of(pool)}
    if not is_split(config, pool) or config.parts is None:
        yield hosts, layouts
        return
    first, size = config.parts[0], config.pool_size(pool)
    yield _cut_to_ranks(hosts, range(first)), layouts
    yield _cut_to_ranks(hosts, range(first, size)), {"rollout": (config.rollout_layout, first)}


def _host_blocks(sizes: Sequence[int]) -> list[Block]:
    """Return a block per host, with all its processes; ranks are counted on from host to host.

    sizes: number of processes on each host
    """
    ends = zip(sizes, accumulate(sizes), strict=True)
    return [
        Block(range(i, i + 1), range(size), range(end - size, end))
        for i, (size, end) in enumerate(ends)
    ]


def _cut_to_ranks(blocks: list[Block], ranks: range) -> list[Block]:
    """Return the blocks cut to the ranks in `ranks`; a block that has none of them is left out."""
    found = []
    for block in blocks:
        first = max(block.ranks.start, ranks.start)
        count = min(block.ranks.stop, ranks.stop) - first
        if count > 0:
            skipped = first - block.ranks.start
            devices = block.devices[skipped : skipped + count]
            found.append(Block(block.hosts, devices, range(first, first + count)))
    return found


def _table(pool: str, hosts: list[Block], layouts: dict[str, Placed], whole: bool) -> str:
    """Return the table of a pool as text, with a heading row.

    layouts: by role name
    whole:   a line per device, else per range of neighbouring hosts with equal layout
    """
    places = list(layouts.values())
    rows: list[list[object]] = [
        ["pool", "hosts", "devices", "ranks", *(f"{role} TP,PP,DP" for role in layouts)]
    ]
    for block in _single_devices(hosts) if whole else _join_alike(hosts, places):
        shown = [_format_span(part) for part in (block.hosts, block.devices, block.ranks)]
        coordinates = [_coordinates(placed, block.ranks) for placed in places]
        rows.append([pool, *shown, *(",".join(map(_format_span, each)) for each in coordinates)])
    return table(rows)


def _single_devices(blocks: list[Block]) -> list[Block]:
    """Split blocks into one per device. Each block must be of one host."""
    return [
        Block(block.hosts, range(device, device + 1), range(rank, rank + 1))
        for block in blocks
        for device, rank in zip(block.devices, block.ranks, strict=True)
    ]


def _join_alike(hosts: list[Block], places: Sequence[Placed]) -> Iterator[Block]:
    """Join neighbouring hosts of equal size that differ only in their data-parallel ranks."""

    def likeness(host: Block) -> tuple[object, ...]:
        return host.devices, *(_coordinates(placed, host.ranks)[:2] for placed in places)

    for _, group in groupby(hosts, likeness):
        first, *rest = group
        last = rest[-1] if rest else first
        ranks = range(first.ranks.start, last.ranks.stop)
        yield Block(range(first.hosts.start, last.hosts.stop), first.devices, ranks)


def _coordinates(placed: Placed, ranks: range) -> list[list[int]]:
    """Return three sorted lists: the TP, PP and DP ranks that `ranks` have in a role's layout.

    placed: the layout, and its first rank in the pool; ranks: counted in the pool
    """
    layout, first = placed
    functions = (layout.tp_rank, layout.pp_rank, layout.dp_rank)
    return [sorted({function(rank - first) for rank in ranks}) for function in functions]


def _format_span(numbers: Sequence[int]) -> str:
    """Format sorted numbers as FIRST-LAST; as one number if they are equal."""
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first}-{last}"
