"""Choose the Ray cluster of a run: a named one, one of this user on this host, or a new one."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

LOCAL, AUTO = "local", "auto"
"""Words of `address`: `local` starts a cluster, `auto` joins one that is found."""


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster of a run.

    address: `host:port` to join; None = start a new cluster; `auto` = a cluster was asked for by
             `auto`, and this user has none on this host
    source:  the key, variable or finding that decided, as text for messages
    """

    address: str | None
    source: str


def choose_cluster(address: str | None) -> Cluster:
    """Return the cluster to join, and the reason as text; with address None one is to be started.

    address: of the key `runtime.address`; None or "" = RAY_ADDRESS, else this user's cluster on
             this host, else a new one. The word `local` asks for a new one, `auto` for this user's;
             if there is none, the result's address is `auto`
    Only this user's cluster is tried (`find_local_cluster`, which may wait); a named one is not.
    """
    named = {"runtime.address": address, "RAY_ADDRESS": os.environ.get("RAY_ADDRESS")}
    for source, given in named.items():
        if given == AUTO:
            return Cluster(
                find_local_cluster() or AUTO, f"{source}={given}, `ray start` of this user"
            )
        if given:
            return Cluster(None if given == LOCAL else given, f"{source}={given}")
    if found := find_local_cluster():
        return Cluster(
            found, "`ray start` of this user on this host; runtime.address=local ignores it"
        )
    return Cluster(None, "no cluster is named, and none of this user runs here")


def find_local_cluster() -> str | None:
    """Return the address that `ray start` of this user noted last, if something listens there."""
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
    """Open and close one TCP connection to `host:port`, to find out whether something listens.

    address:   `host:port` or `[IPv6]:port`
    timeout_s: for each address of the host; resolving its name has no deadline
    Errors: OSError when nothing listens, ValueError when it is no `host:port`.
    """
    named = urlsplit(f"//{address}")
    if not named.hostname or not named.port:
        raise ValueError("it is not host:port")
    socket.create_connection((named.hostname, named.port), timeout_s).close()
