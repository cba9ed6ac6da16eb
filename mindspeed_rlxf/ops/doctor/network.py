"""Interfaces, names, ports and proxies: where collectives between hosts go astray."""

from __future__ import annotations

import os
import re
import socket
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from mindspeed_rlxf.ops.doctor.findings import Finding, error, ok, warning

# Exact names; the others take prefixes with `=` for exact and `^` for all but.
EXACT = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
BY_PREFIX = ("HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
PORT_RANGES = ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")
BASE_PORT, BASE_PORT_COUNT = "HCCL_IF_BASE_PORT", 32  # ports from the base on, one per process
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
EPHEMERAL_PORTS = 10_000  # each rank of a full mesh holds a connection to every other
VIRTUAL = re.compile(r"^(lo|docker|veth|br-|virbr|cni|flannel|ifb|dummy|tunl)")


def interfaces() -> dict[str, bool]:
    """Name -> is up, of all with an address."""
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: bool(name in states and states[name].isup)
        for name, found in addresses.items()
        if any(address.family in families for address in found)
    }


def interface_findings(
    there: Mapping[str, bool], environment: Mapping[str, str], several_hosts: bool
) -> list[Finding]:
    """What the variables name has to be there and up; between hosts it may not be loopback."""
    found = []
    for variable in (*EXACT, *BY_PREFIX):
        value = environment.get(variable)
        if value is None:
            continue
        chosen = _chosen(variable, value, there)
        check, shown = f"network.{variable.lower()}", f"{variable}={value}"
        if not chosen:
            remedy = f"use one of {', '.join(there)}, on this host"
            found.append(error(check, f"{shown} names no interface with an address", remedy))
        elif not any(there[name] for name in chosen):
            found.append(error(check, f"{shown} is down", f"bring up {', '.join(chosen)}"))
        elif several_hosts and all(name.startswith("lo") for name in chosen):
            remedy = "name the interface that the hosts share"
            found.append(error(check, f"{shown} cannot reach other hosts", remedy))
        else:
            found.append(ok(check, shown))
    return found + _unset(there, environment, several_hosts)


def _chosen(variable: str, value: str, there: Mapping[str, bool]) -> list[str]:
    if variable in EXACT:
        return [name for name in value.split(",") if name in there]
    excluded, rest = value.startswith("^"), value.lstrip("^")
    exact, words = rest.startswith("="), tuple(filter(None, rest.lstrip("=").split(",")))

    def named(name: str) -> bool:
        bare = tuple(word.partition(":")[0] for word in words)
        return name in bare if exact else name.startswith(bare)

    return [name for name in there if named(name) != excluded]


def _unset(
    there: Mapping[str, bool], environment: Mapping[str, str], several_hosts: bool
) -> list[Finding]:
    candidates = [name for name, up in there.items() if up and not VIRTUAL.match(name)]
    value = f"up: {', '.join(candidates) or 'none but loopback'}"
    unset = "GLOO_SOCKET_IFNAME" not in environment
    if several_hosts and unset and len(candidates) != 1:
        remedy = "export GLOO_SOCKET_IFNAME (NPU: HCCL_SOCKET_IFNAME too) with the shared one"
        return [warning("network.interfaces", value, remedy)]
    return [ok("network.interfaces", value)]


def host_name(several_hosts: bool) -> Finding:
    """gloo takes the address of the host's name where no interface is named."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        remedy = f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return warning("network.host_name", f"{name} has no address", remedy)
    if several_hosts and address.startswith("127."):
        remedy = "set GLOO_SOCKET_IFNAME, or correct /etc/hosts: other hosts cannot reach it there"
        return warning("network.host_name", f"{name} is {address}", remedy)
    return ok("network.host_name", f"{name} is {address}")


def proxy_finding(environment: Mapping[str, str], addresses: Sequence[str]) -> Finding:
    """addresses: of this host and of the cluster; connections to them must not take a proxy."""
    named = {name: value for name, value in environment.items() if name.lower() in PROXIES}
    named = {name: value for name, value in named.items() if value}
    if not named:
        return ok("network.proxy", "none set")
    exempt = environment.get("no_proxy", environment.get("NO_PROXY", ""))
    taken = [address for address in addresses if not _is_exempt(address, exempt)]
    shown = ", ".join(f"{name}={_without_password(value)}" for name, value in named.items())
    if not taken:
        return ok("network.proxy", f"{shown}, not for this host")
    remedy = (
        f"export no_proxy={','.join(dict.fromkeys([*filter(None, exempt.split(',')), *taken]))}"
    )
    return warning("network.proxy", f"{shown}, also for {', '.join(taken)}", remedy)


def _is_exempt(address: str, exempt: str) -> bool:
    words = [word.strip() for word in exempt.split(",") if word.strip()]
    return any(word == "*" or word == address or address.endswith(word) for word in words)


def _without_password(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port}" if parts.hostname else "(set)"


def port_findings(
    environment: Mapping[str, str],
    ephemeral: tuple[int, int] | None = None,
    listening: frozenset[int] | None = None,
) -> list[Finding]:
    """Ranges for the device's library: readable, apart from one another, free."""
    ephemeral = ephemeral or ephemeral_range()
    listening = listening_ports() if listening is None else listening
    count = ephemeral[1] - ephemeral[0] + 1
    value = f"{ephemeral[0]}-{ephemeral[1]}, {count} ports"
    remedy = 'sysctl -w net.ipv4.ip_local_port_range="20000 60999"'
    few = count < EPHEMERAL_PORTS
    found = [
        warning("ports.local", value, remedy) if few else ok("ports.local", value),
    ]
    ranges: dict[str, tuple[int, int]] = {}
    for variable in (*PORT_RANGES, BASE_PORT):
        text = environment.get(variable)
        if text is None or text == "auto":
            continue
        check = f"ports.{variable.lower()}"
        try:
            ranges[variable] = _range(variable, text)
        except ValueError:
            remedy = "write FIRST-LAST, for example 60000-60050 (HCCL_IF_BASE_PORT: one number)"
            found.append(error(check, f"{variable}={text} is no range of ports", remedy))
    found += [
        _range_finding(variable, bounds, ranges, ephemeral, listening)
        for variable, bounds in ranges.items()
    ]
    return found


def _range(variable: str, text: str) -> tuple[int, int]:
    """First and last port. Raises ValueError."""
    if variable == BASE_PORT:
        first = int(text)
        last = first + BASE_PORT_COUNT - 1
    else:
        parts = [int(word) for word in re.split(r"[-,]", text)]
        first, last = min(parts), max(parts)
    if not 1024 <= first <= last <= 65535:
        raise ValueError(text)
    return first, last


def _range_finding(
    variable: str,
    bounds: tuple[int, int],
    ranges: Mapping[str, tuple[int, int]],
    ephemeral: tuple[int, int],
    listening: frozenset[int],
) -> Finding:
    check, (first, last) = f"ports.{variable.lower()}", bounds
    value = f"{variable} {first}-{last}"
    for other, theirs in ranges.items():
        if other != variable and _overlap(bounds, theirs):
            return error(check, f"{value} overlaps with {other}", "give each its own range")
    taken = sorted(port for port in listening if first <= port <= last)
    if taken:
        shown = ", ".join(map(str, taken[:5])) + (" ..." if len(taken) > 5 else "")
        remedy = "end what listens there, or choose another range"
        return warning(check, f"{value}: {len(taken)} taken ({shown})", remedy)
    if _overlap(bounds, ephemeral):
        remedy = f"sysctl -w net.ipv4.ip_local_reserved_ports={first}-{last}, or choose another"
        return warning(check, f"{value} lies in the local port range, others may take it", remedy)
    return ok(check, value)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]


def ephemeral_range() -> tuple[int, int]:
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    first, last = map(int, text.split())
    return first, last


def listening_ports() -> frozenset[int]:
    return frozenset(
        port for name in ("tcp", "tcp6") for port in _listening(Path(f"/proc/net/{name}"))
    )


def _listening(file: Path) -> Iterator[int]:
    """Of a table of the kernel: `sl local_address rem_address st ...`, state 0A = listening."""
    if not file.exists():
        return
    for line in file.read_text(encoding="ascii").splitlines()[1:]:
        columns = line.split()
        if columns[3] == "0A":
            yield int(columns[1].rpartition(":")[2], 16)


def look(several_hosts: bool = False, addresses: Sequence[str] = ()) -> list[Finding]:
    """All but the host's name, which may ask a server."""
    mine = ["127.0.0.1", "localhost", *addresses]
    return [
        *interface_findings(interfaces(), os.environ, several_hosts),
        proxy_finding(os.environ, mine),
        *port_findings(os.environ),
    ]
