"""Choose a run's Ray cluster: a named one, this user's on this host, or a new one."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

LOCAL = "local"  # the address that asks for a new cluster
AUTO = "auto"  # the address that joins this user's cluster on this host


@dataclass(frozen=True)
class Cluster:
    """A run's Ray cluster.

    Attributes:
        address: `host:port` to join; None = start a new cluster; `auto` = asked for by `auto`, but
            this user has no cluster on this host.
        source: The deciding key, variable or finding, for messages.
    """

    address: str | None
    source: str


def choose_cluster(address: str | None) -> Cluster:
    """Return the cluster to join or start.

    Connects only to this user's cluster (`find_local_cluster`, which may wait), not to a named one.

    Args:
        address: `runtime.address`. None or "" = RAY_ADDRESS, else this user's cluster on this host,
            else a new one. `local` asks for a new one, `auto` for this user's.
    """
    addresses = {"runtime.address": address, "RAY_ADDRESS": os.environ.get("RAY_ADDRESS")}
    for source, requested in addresses.items():
        if requested == AUTO:
            source = f"{source}={requested}, `ray start` of this user"
            return Cluster(find_local_cluster() or AUTO, source)
        if requested:
            return Cluster(None if requested == LOCAL else requested, f"{source}={requested}")
    local_cluster = find_local_cluster()
    if local_cluster is not None:
        source = "`ray start` of this user on this host; runtime.address=local ignores it"
        return Cluster(local_cluster, source)
    return Cluster(None, "no cluster is named, and none of this user runs here")


def find_local_cluster() -> str | None:
    """Return the address last noted by this user's `ray start`, if something listens there."""
    root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(root) / "ray" / "ray_current_cluster"
    try:
        if file.stat().st_uid != os.getuid():
            return None
        address = file.read_text(encoding="utf-8").strip()
        connect_once(address)
    except (OSError, ValueError):
        return None
    return address


def connect_once(address: str, timeout_s: float = 2.0) -> None:
    """Check that something listens at `host:port` by opening one TCP connection.

    Args:
        address: `host:port` or `[IPv6]:port`.
        timeout_s: Per resolved address; name resolution has no deadline.

    Raises:
        OSError: Nothing listens.
        ValueError: It is no `host:port`.
    """
    url = urlsplit(f"//{address}")
    if not url.hostname or not url.port:
        raise ValueError("it is not host:port")
    socket.create_connection((url.hostname, url.port), timeout_s).close()
