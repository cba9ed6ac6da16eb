"""Who listens at an address of this host: the kernel knows the user of every socket."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import psutil

Ip: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.\-]+):(?P<port>\d{1,5})", re.ASCII)
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENS = "0A"


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `host:port`; ValueError for anything else."""
    found = ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ValueError("it is not host:port")
    return found["host"].strip("[]"), int(found["port"])


def is_here(host: str) -> bool:
    """Whether the name or number is one of this host; OSError where the name is not known."""
    own = {_ip(each.address) for found in psutil.net_if_addrs().values() for each in found}
    return all(ip.is_loopback or ip in own for ip in _addresses(host))


def owners(address: str) -> frozenset[int]:
    """User ids of the sockets of this host that listen at `host:port`, at all addresses too."""
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
    """None for what is no address of IP; an IPv4 one in IPv6 is the former."""
    try:
        ip = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def _listening(table: Path) -> Iterator[tuple[Ip, int, int]]:
    """Address, port and user of each listening socket of a table of the kernel (proc(5))."""
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
