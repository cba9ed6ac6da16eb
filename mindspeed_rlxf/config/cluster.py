"""The Ray cluster of a run: one that is named, one of this user on this host, or an own one."""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rlxf.config.listeners import host_and_port, is_here, owners

LOCAL, AUTO = "local", "auto"
"""Ray's words for a cluster of one's own, and for one that is found."""
KNOCK_S = 2.0
NOTE_BYTES = 300  # of an address


@dataclass(frozen=True)
class Cluster:
    """address: of the cluster to join, None = start an own one; source: why, for people.

    An address that is `auto` says that none was found; Ray would look for one among the processes
    of all users.
    """

    address: str | None
    source: str


def choose_cluster(address: str | None) -> Cluster:
    """address: `runtime.address`, which comes before RAY_ADDRESS and before what runs here."""
    for given, source in (
        (address, "runtime.address"),
        (os.environ.get("RAY_ADDRESS"), "RAY_ADDRESS"),
    ):
        if given == AUTO:
            return Cluster(started_here() or AUTO, f"{source}={given}, `ray start` of this user")
        if given:
            return Cluster(None if given == LOCAL else given, f"{source}={given}")
    found = started_here()
    if found:
        return Cluster(
            found, "`ray start` of this user on this host; runtime.address=local ignores it"
        )
    return Cluster(None, "no cluster is named, and none of this user runs here")


def started_here() -> str | None:
    """What the last `ray start` on this host left, when it is this user's and answers.

    Other users may write in the folder of the note, so who listens at an address of this host is
    asked of the kernel.
    """
    try:
        address = _read_note(address_file())
        host, _ = host_and_port(address)
        if is_here(host) and owners(address) != {os.getuid()}:
            return None
        knock(address)
    except (OSError, ValueError):
        return None
    return address


def _read_note(file: Path) -> str:
    """Raises OSError where it is no file of this user, but a link or a pipe."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise OSError(f"{file} is no file of this user")
        return os.read(descriptor, NOTE_BYTES).decode("utf-8").strip()
    finally:
        os.close(descriptor)


def address_file() -> Path:
    """Where Ray notes it."""
    root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(root) / "ray" / "ray_current_cluster"


def knock(address: str, timeout_s: float = KNOCK_S) -> None:
    """Raise OSError when nobody listens at `host:port`, ValueError when it is something else; Ray
    would try for minutes."""
    socket.create_connection(host_and_port(address), timeout_s).close()
