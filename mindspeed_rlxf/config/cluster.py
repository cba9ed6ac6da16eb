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
"""Words of `address`: `local` starts a cluster, `auto` joins one that is found."""
CONNECT_S = 2.0  # longest wait for a TCP connection
ADDRESS_BYTES = 300  # of Ray's file with an address, at most

Ip: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.\-]+):(?P<port>\d{1,5})", re.ASCII)
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENS = "0A"  # state of a socket in TABLES


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
    """Return the address in Ray's file of the cluster started last; None unless it is safe to join.

    The file must be this user's (`_read_address`), and something must accept a connection at the
    address within CONNECT_S. If the address is of this host, only processes of this user may listen
    there (other users can write in the file's folder). Resolving a host name has no deadline.
    """
    try:
        address = _read_address(address_file())
        host, _ = host_and_port(address)
        if is_here(host) and find_owners(address) != {os.getuid()}:
            return None
        connect_once(address)
    except (OSError, ValueError):
        return None
    return address


def _read_address(file: Path) -> str:
    """Return the first ADDRESS_BYTES bytes of `file` as text without outer white space.

    Errors: OSError where it is missing, no plain file, a link or a file of another user; ValueError
    where it is not UTF-8.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise OSError(f"{file} is no file of this user")
        return os.read(descriptor, ADDRESS_BYTES).decode("utf-8").strip()
    finally:
        os.close(descriptor)


def address_file() -> Path:
    """Return the path of the file in which `ray start` stores its cluster's address.

    In RAY_TMPDIR, else TMPDIR, else /tmp. It may not exist.
    """
    root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(root) / "ray" / "ray_current_cluster"


def connect_once(address: str, timeout_s: float = CONNECT_S) -> None:
    """Open and close one TCP connection to `host:port`, to find out whether something listens.

    timeout_s: for each address of the host; resolving its name has no deadline
    Errors: OSError when nothing listens, ValueError when it is no `host:port`.
    """
    socket.create_connection(host_and_port(address), timeout_s).close()


def host_and_port(address: str) -> tuple[str, int]:
    """Split `host:port` or `[IPv6]:port` into the host, without brackets, and the port.

    Errors: ValueError for other text, and for a port not from 1 to 65535.
    """
    found = ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ValueError("it is not host:port")
    return found["host"].strip("[]"), int(found["port"])


def is_here(host: str) -> bool:
    """Return whether every address of `host`, a name or IP address, is loopback or this host's.

    Errors: OSError for a name that cannot be resolved, ValueError for one with an empty label.
    """
    own = {_ip(each.address) for found in psutil.net_if_addrs().values() for each in found}
    return all(ip.is_loopback or ip in own for ip in _addresses(host))


def find_owners(address: str) -> frozenset[int]:
    """Return the user ids of the sockets on this host that listen at `host:port` over TCP.

    A socket that listens at the port on all addresses counts. Empty where nothing listens, or
    where the kernel's tables cannot be read.
    Errors: OSError for an unknown host name, ValueError for text that is not `host:port`.
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
    """Parse an IP address; None for other text. An IPv4-mapped IPv6 address becomes IPv4.

    A zone (`%eth0`) is cut off.
    """
    try:
        ip = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def _listening(table: Path) -> Iterator[tuple[Ip, int, int]]:
    """Yield address, port and user id of each listening socket of a kernel table (proc(5)).

    Yields nothing where the table cannot be read. An IPv4-mapped IPv6 address becomes IPv4.
    """
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
