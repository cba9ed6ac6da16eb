"""Check interfaces, host name, ports and proxies, which often break collectives between hosts."""

from __future__ import annotations

import os
import re
import socket
import urllib.parse
from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from mindspeed_rlxf.ops.doctor.findings import Finding, error, judge, ok, warning

# Exact names; the others take prefixes with `=` for exact and `^` for all but.
EXACT = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
BY_PREFIX = ("HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
PORT_RANGES = ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")
BASE_PORT, BASE_PORT_COUNT = "HCCL_IF_BASE_PORT", 32  # ports from the base on, one per process
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
OWN_NAMES = ("127.0.0.1", "localhost")
EPHEMERAL_PORTS = 10_000  # each rank of a full mesh holds a connection to every other
VIRTUAL = re.compile(r"^(lo|docker|veth|br-|virbr|cni|flannel|ifb|dummy|tunl)")


def check_network(several_hosts: bool) -> list[Finding]:
    """Run all network checks except that of the host name, which may have to wait for a server."""
    return [
        *interface_findings(interfaces(), os.environ, several_hosts),
        proxy_finding(os.environ),
        *port_findings(os.environ, ephemeral_ports(), listening_ports()),
    ]


def interfaces() -> dict[str, bool]:
    """Map each network interface with an IP address to whether it is up."""
    states = psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: bool(name in states and states[name].isup)
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.family in families for address in addresses)
    }


def interface_findings(
    existing: Mapping[str, bool], environment: Mapping[str, str], several_hosts: bool
) -> Iterator[Finding]:
    """Yield a finding per variable that names interfaces, then one on the choice of interfaces.

    A variable is an error if it selects none, or only such as are down; else `ok`. The choice is
    `ok` on one host, and on several if GLOO_SOCKET_IFNAME is set or exactly one interface is up,
    virtual ones not counted; else a warning.
    existing:      interface -> whether it is up
    several_hosts: a variable that selects only loopback interfaces is an error too
    """
    for variable in (*EXACT, *BY_PREFIX):
        value = environment.get(variable)
        if value is None:
            continue
        chosen = _select_interfaces(variable, value, existing)
        check, shown = f"network.{variable.lower()}", f"{variable}={value}"
        if not chosen:
            yield error(
                check,
                f"{shown} names no interface with an address",
                f"use one of {', '.join(existing)}, on this host",
            )
        elif not any(existing[name] for name in chosen):
            yield error(check, f"{shown} is down", f"bring up {', '.join(chosen)}")
        elif several_hosts and all(name.startswith("lo") for name in chosen):
            yield error(
                check,
                f"{shown} cannot reach other hosts",
                "name the interface that the hosts share",
            )
        else:
            yield ok(check, shown)
    candidates = [name for name, up in existing.items() if up and not VIRTUAL.match(name)]
    is_clear = not several_hosts or "GLOO_SOCKET_IFNAME" in environment or len(candidates) == 1
    yield judge(
        is_clear,
        "network.interfaces",
        f"up: {', '.join(candidates) or 'none but loopback'}",
        "export GLOO_SOCKET_IFNAME (NPU: HCCL_SOCKET_IFNAME too) with the shared one",
    )


def _select_interfaces(variable: str, value: str, existing: Mapping[str, bool]) -> list[str]:
    """Return the names in `existing` that a variable's value selects; [] for an empty value.

    The value of a variable in EXACT lists whole names, without a port. Others list prefixes, or
    whole names after a `=`; a port after a colon is ignored there, and with a `^` at the start they
    select all but those.
    existing: its keys are the names
    """
    if variable in EXACT:
        return [name for name in value.split(",") if name in existing]
    excluded, rest = value.startswith("^"), value.lstrip("^")
    words = tuple(word.partition(":")[0] for word in rest.lstrip("=").split(",") if word)
    if rest.startswith("="):
        named = [name for name in existing if name in words]
    else:
        named = [name for name in existing if name.startswith(words)]
    return [name for name in existing if (name in named) != excluded]


def host_name(several_hosts: bool) -> Finding:
    """Warn if the host's name has no address, or a loopback address in a run over several hosts.

    Gloo uses this address where no interface is named. May wait for a name server.
    """
    check, name = "network.host_name", socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return warning(
            check, f"{name} has no address", f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        )
    remedy = "set GLOO_SOCKET_IFNAME, or correct /etc/hosts: other hosts cannot reach it there"
    is_loopback = address.startswith("127.")
    return judge(not (several_hosts and is_loopback), check, f"{name} is {address}", remedy)


def proxy_finding(environment: Mapping[str, str]) -> Finding:
    """Warn if proxy variables also apply to OWN_NAMES, as no_proxy lacks them; else return `ok`.

    Passwords are not shown. no_proxy in lower case has priority.
    """
    named = {k: v for k, v in environment.items() if k.lower() in PROXIES and v}
    if not named:
        return ok("network.proxy", "none set")
    exempt = environment.get("no_proxy", environment.get("NO_PROXY", ""))
    words = [word.strip() for word in exempt.split(",") if word.strip()]
    proxied = [name for name in OWN_NAMES if "*" not in words and not name.endswith(tuple(words))]
    shown = ", ".join(f"{name}={_without_password(value)}" for name, value in named.items())
    value = f"{shown}, also for {', '.join(proxied)}" if proxied else f"{shown}, not for this host"
    return judge(
        not proxied,
        "network.proxy",
        value,
        f"export no_proxy={','.join(dict.fromkeys(words + proxied))}",
    )


def _without_password(url: str) -> str:
    """Return `scheme://host[:port]` of a URL; "(set)" if it has no host or a bad port.

    The host is in lower case, the port left out if the URL has none. "(set)" also where an @ comes
    after the host: the password has an unescaped /, ? or #, so its beginning looks like a port.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "(set)"
    if not host or "@" in url.split(parts.netloc, 1)[1]:
        return "(set)"
    shown = f"[{host}]" if ":" in host else host  # an IPv6 address
    return f"{parts.scheme}://{shown}" + ("" if port is None else f":{port}")


def port_findings(
    environment: Mapping[str, str], ephemeral: range, listening: Collection[int]
) -> Iterator[Finding]:
    """Yield a finding on the number of local ports, and one per port range set for HCCL.

    Too few local ports are a warning. A range that is invalid or overlaps another is an error;
    one that has ports in use, or overlaps the local ports, is a warning; else `ok`.
    environment: variables that set HCCL's ranges; an unset one, or `auto`, is not checked
    ephemeral:   local ports, which the kernel gives to outgoing connections
    listening:   ports in use
    """
    yield judge(
        len(ephemeral) >= EPHEMERAL_PORTS,
        "ports.local",
        f"{_span(ephemeral)}, {len(ephemeral)} ports",
        'sysctl -w net.ipv4.ip_local_port_range="20000 60999"',
    )
    ranges: dict[str, range] = {}
    for variable in (*PORT_RANGES, BASE_PORT):
        text = environment.get(variable, "auto")
        if text == "auto":
            continue
        try:
            ranges[variable] = _port_range(variable, text)
        except ValueError:
            yield error(
                f"ports.{variable.lower()}",
                f"{variable}={text} is no range of ports",
                "write FIRST-LAST, for example 60000-60050 (HCCL_IF_BASE_PORT: one number)",
            )
    overlaps: dict[str, str] = {}
    for one, other in combinations(ranges, 2):
        if _overlap(ranges[one], ranges[other]):
            overlaps.setdefault(one, other)
            overlaps.setdefault(other, one)
    for variable, ports in ranges.items():
        check, value = f"ports.{variable.lower()}", f"{variable} {_span(ports)}"
        used = sorted(port for port in listening if port in ports)
        if variable in overlaps:
            yield error(
                check, f"{value} overlaps with {overlaps[variable]}", "give each its own range"
            )
        elif used:
            shown = ", ".join(map(str, used[:5])) + (" ..." if len(used) > 5 else "")
            yield warning(
                check,
                f"{value}: {len(used)} in use ({shown})",
                "end what listens there, or choose another range",
            )
        elif _overlap(ports, ephemeral):
            reserve = f"sysctl -w net.ipv4.ip_local_reserved_ports={_span(ports)}"
            value = f"{value} lies in the local port range, others may take it"
            yield warning(check, value, f"{reserve}, or choose another")
        else:
            yield ok(check, value)


def _port_range(variable: str, text: str) -> range:
    """Parse ports such as "6000-6010" or "6000,6010" into the range from the lowest to the highest.

    Of BASE_PORT, one number: the range of BASE_PORT_COUNT ports that begins there.
    Raises ValueError if a port is no number in 1024-65535.
    """
    numbers = [int(word) for word in re.split(r"[-,]", text)]
    first, last = min(numbers), max(numbers)
    if variable == BASE_PORT:
        first, last = int(text), int(text) + BASE_PORT_COUNT - 1
    if not 1024 <= first <= last <= 65535:
        raise ValueError(text)
    return range(first, last + 1)


def _span(ports: range) -> str:
    return f"{ports[0]}-{ports[-1]}"


def _overlap(a: range, b: range) -> bool:
    return a[0] <= b[-1] and b[0] <= a[-1]


def ephemeral_ports() -> range:
    """Return the ports that the kernel gives to outgoing connections."""
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    first, last = map(int, text.split())
    return range(first, last + 1)


def listening_ports() -> set[int]:
    """Return the TCP ports, IPv4 and IPv6, that any process on this host listens on.

    Reads /proc/net/tcp and tcp6; a file that does not exist counts as empty.
    """
    files = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    lines = [
        line.split()
        for file in files
        if file.exists()
        for line in file.read_text(encoding="ascii").splitlines()[1:]
    ]
    return {int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == "0A"}
