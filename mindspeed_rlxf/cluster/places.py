"""Which worker process becomes which rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from mindspeed_rlxf.cluster.nodes import address_key

A = TypeVar("A")


@dataclass(frozen=True)
class Place:
    """Where a worker process is."""

    host: str
    ip: str
    entry: int  # which number of `processes_per_node` it was started for
    devices: tuple[int, ...]  # ids that Ray gave it; empty for logical devices
    pid: int = 0
    node: str = ""  # its id in Ray
    oom_kills: int = 0  # for memory on its host, before it started


def by_rank(found: Sequence[tuple[A, Place]]) -> tuple[tuple[A, ...], tuple[Place, ...]]:
    """Processes and their places in the order of ranks: by node, then by device id.

    Entries keep the order of `processes_per_node`, which the plan shows; those of one size, which
    Ray may put on these nodes in any order, go by address: a restart on them gives the same ranks.
    """
    sizes = Counter(place.entry for _, place in found)
    address = {place.entry: address_key(place.ip) for _, place in found}
    position: dict[int, int] = {}
    for size in set(sizes.values()):
        slots = sorted(entry for entry in sizes if sizes[entry] == size)
        position |= dict(zip(sorted(slots, key=lambda e: (address[e], e)), slots, strict=True))

    def key(pair: tuple[A, Place]) -> tuple[int, tuple[int, ...]]:
        return position[pair[1].entry], pair[1].devices

    ordered = sorted(found, key=key)
    return tuple(process for process, _ in ordered), tuple(place for _, place in ordered)


def described(places: Sequence[Place]) -> str:
    """`ranks 0-7 on node1 (10.0.0.1), ranks 8-15 on node2 (10.0.0.2)`."""
    parts, first = [], 0
    for (host, ip), group in groupby(places, key=lambda place: (place.host, place.ip)):
        last = first + len(list(group)) - 1
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        parts.append(f"{ranks} on {host} ({ip})")
        first = last + 1
    return ", ".join(parts)
