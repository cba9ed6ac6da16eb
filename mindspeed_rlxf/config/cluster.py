"""Choose the Ray cluster of a run: a named one, one of this user on this host, or a new one."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psutil

LOCAL, AUTO = "local", "auto"
"""Ray's words for a new cluster, and for one that it finds."""
KNOCK_S = 2.0
NOTE_BYTES = 300  # of an address

Ip: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.\-]+):(?P<port>\d{1,5})", re.ASCII)
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENS = "0A"


@dataclass(frozen=True)
class Cluster:
    """
    address: of the cluster to join; None = start a new one; `auto` = none was found, where Ray
             would search the processes of all users
    source:  which key or variable chose it, for people
    """

    address: str | None
    source: str


def choose_cluster(address: str | None) -> Cluster:
    """Choose by `runtime.address` (`address`), then RAY_ADDRESS, then what runs on this host."""
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
    """Return the address that the last `ray start` noted, if it is this user's and answers.

    Other users may write in the folder of the note, so the kernel is asked whose process listens.
    """
    try:
        address = _read_note(address_file())
        host, _ = host_and_port(address)
        if is_here(host) and find_owners(address) != {os.getuid()}:
            return None
        connect_once(address)
    except (OSError, ValueError):
        return None
    return address


def _read_note(file: Path) -> str:
    """Read an address. Errors: OSError where this is a link, a pipe or a file of another user."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise OSError(f"{file} is no file of this user")
        return os.read(descriptor, NOTE_BYTES).decode("utf-8").strip()
    finally:
        os.close(descriptor)


def address_file() -> Path:
    """Return the file in which Ray notes the address of the cluster that it started last."""
    root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(root) / "ray" / "ray_current_cluster"


def connect_once(address: str, timeout_s: float = KNOCK_S) -> None:
    """Connect once to `host:port`, as Ray would retry for minutes.

    Errors: OSError when nobody listens there, ValueError when it is no `host:port`.
    """
    socket.create_connection(host_and_port(address), timeout_s).close()


def host_and_port(address: str) -> tuple[str, int]:
    """Split `host:port`. Errors: ValueError for anything else."""
    found = ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ValueError("it is not host:port")
    return found["host"].strip("[]"), int(found["port"])


def is_here(host: str) -> bool:
    """Whether a name or number is one of this host. Errors: OSError for an unknown name."""
    own = {_ip(each.address) for found in psutil.net_if_addrs().values() for each in found}
    return all(ip.is_loopback or ip in own for ip in _addresses(host))


def find_owners(address: str) -> frozenset[int]:
    """Return the user ids of this host's sockets that listen at `host:port`.

    Those that listen at the port of every address count too.
    """
    host, port = host_and_port(address)
    wanted = _addresses(host)
    return frozenset(
        uid
        for table in TABLES
        for ip, found, uid in _listening(table)
        if found == port and (ip in wanted or ip.is_unspecified)
    )


def _addresses(host: str) -> set[Ip]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {ip for *_, where in found if (ip := _ip(str(where[0]))) is not None}


def _ip(text: str) -> Ip | None:
    """Parse an IP address; None for other text. An IPv4 address inside IPv6 becomes IPv4."""
    try:
        ip = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def _listening(table: Path) -> Iterator[tuple[Ip, int, int]]:
    """Yield address, port and user of each listening socket of a kernel table (proc(5))."""
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:  # without IPv6
        return
    for words in map(str.split, lines):
        if words[3] == LISTENS:
            address, port = words[1].split(":")
            groups = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
            ip = _ip(str(ipaddress.ip_address(b"".join(groups))))
            assert ip is not None, "made of bytes"
            yield ip, int(port, 16), int(words[7])
