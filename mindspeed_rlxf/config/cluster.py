"""The Ray cluster of a run: one that is named, one of this user on this host, or an own one."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

LOCAL = "local"
"""Ray's word for a cluster of one's own."""
KNOCK_S = 2.0


@dataclass(frozen=True)
class Cluster:
    """address: of the cluster to join, None = start an own one; source: why, for people.

    found: nobody named it, Ray left its address here
    """

    address: str | None
    source: str
    found: bool = False


def choose_cluster(address: str | None) -> Cluster:
    """address: `runtime.address`, which comes before RAY_ADDRESS and before what runs here."""
    for given, source in (
        (address, "runtime.address"),
        (os.environ.get("RAY_ADDRESS"), "RAY_ADDRESS"),
    ):
        if given:
            return Cluster(None if given == LOCAL else given, f"{source}={given}")
    found = started_here()
    if found:
        return Cluster(
            found,
            "`ray start` of this user on this host; runtime.address=local ignores it",
            found=True,
        )
    return Cluster(None, "no cluster is named, and none of this user runs here")


def started_here() -> str | None:
    """What the last `ray start` on this host left, when it is this user's and answers."""
    file = address_file()
    try:
        if file.stat().st_uid != os.getuid():
            return None
        address = file.read_text(encoding="utf-8").strip()
        knock(address)
    except (OSError, ValueError):
        return None
    return address or None


def address_file() -> Path:
    """Where Ray notes it."""
    root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(root) / "ray" / "ray_current_cluster"


def knock(address: str, timeout_s: float = KNOCK_S) -> None:
    """Raise OSError when nobody listens at `host:port`; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
