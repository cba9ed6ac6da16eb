"""Which worker process becomes which rank."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

A = TypeVar("A")


@dataclass(frozen=True)
class Place:
    """Where a worker process is."""

    host: str
    ip: str
    entry: int  # which number of `processes_per_node` it was started for
    devices: tuple[int, ...]  # ids that Ray gave it; empty for logical devices
    build: str  # of this package, as `installed.build`


def by_rank(found: Sequence[tuple[A, Place]]) -> tuple[tuple[A, ...], tuple[Place, ...]]:
    """Processes and their places in the order of ranks: by node, then by device id.

    The same after a restart on the same nodes.
    """

    def key(entry: tuple[A, Place]) -> tuple[int, int, int, tuple[int, ...]]:
        place = entry[1]
        ip = ipaddress.ip_address(place.ip)
        return ip.version, int(ip), place.entry, place.devices

    ordered = sorted(found, key=key)
    return tuple(process for process, _ in ordered), tuple(place for _, place in ordered)
