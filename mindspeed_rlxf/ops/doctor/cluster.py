"""Check every host of a Ray cluster, compare the hosts, and try collectives among them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster import installed
from mindspeed_rlxf.cluster.environment import forwarded_environment
from mindspeed_rlxf.cluster.errors import HostError
from mindspeed_rlxf.cluster.host_agent import HostAgent, collect_outcomes
from mindspeed_rlxf.cluster.nodes import Node
from mindspeed_rlxf.cluster.ray.cluster import open_cluster
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.withheld import open_variables
from mindspeed_rlxf.device import npu_versions
from mindspeed_rlxf.ops.doctor import local
from mindspeed_rlxf.ops.doctor.collectives import check_collectives
from mindspeed_rlxf.ops.doctor.devices import ray_finding
from mindspeed_rlxf.ops.doctor.findings import (
    Finding,
    Status,
    describe,
    error,
    merge,
    ok,
    warning,
)
from mindspeed_rlxf.ops.doctor.hunt import Party
from mindspeed_rlxf.ops.doctor.subject import Subject

SURVEY_S = 90.0  # checks of a host take 65 at most, its first process some to start
START_S = 60.0  # processes of the ranks, which import torch
CLOCK_S, CLOCK_REPLY_S = 1.0, 3.0
MOST_RANKS_ON_CPU = 8

Facts = tuple[list[Finding], dict[str, str]]


def survey_host(subject: Subject) -> Facts:
    """Run the checks of the host that this process is on; return its findings and its versions."""
    return local.check_host(subject), versions()


def versions() -> dict[str, str]:
    """Return name -> version of what must be equal on all hosts: packages, `python`, `cann`.

    What is not installed has the version `installed.NONE`.
    """
    cann = npu_versions.cann_version() or installed.NONE
    found = installed.versions(npu_versions.PACKAGES)
    return {**found, "python": platform.python_version(), "cann": cann}


def check_cluster(
    subject: Subject, address: str | None, deadline_s: float, allow_unauthenticated: bool = False
) -> list[Finding]:
    """Join a Ray cluster, return findings on its hosts and collectives, and leave it.

    address:    None = RAY_ADDRESS
    deadline_s: after it no check is begun; joining the cluster is not limited by it
    allow_unauthenticated: also join a cluster that asks for no token
    Sets environment variables of Ray. Raises UserError when no cluster is named, or `local`, or it
    cannot be joined; a RuntimeError of joining becomes the only finding.
    """
    end = time.monotonic() + deadline_s
    if (address or os.environ.get("RAY_ADDRESS") or "local") == "local":
        raise UserError(
            Problem(
                "--cluster",
                "needs a Ray cluster and none is named",
                remedy="set RAY_ADDRESS, runtime.address or --address, for example to auto for "
                "one that runs on this host",
            )
        )
    try:
        cluster = open_cluster(address, {}, allow_unauthenticated)
    except RuntimeError as problem:  # `open_cluster` raises most failures as UserError
        return [_failed("cluster.join", problem)]
    try:
        return _check_joined(subject, end)
    finally:
        cluster.close()


def _check_joined(subject: Subject, end: float) -> list[Finding]:
    """Check each host of the joined cluster, compare the hosts, and try collectives among them.

    end: deadline, of `time.monotonic`
    Hosts that do not answer, and collectives that raise, become errors in the findings.
    """
    from mindspeed_rlxf.cluster.ray.agent import RayAgents, live_nodes  # after Ray's environment

    nodes = live_nodes(_resource(subject))
    environment = open_variables(forwarded_environment(os.environ))
    agents = RayAgents(environment)
    try:
        limit = min(SURVEY_S, (end - time.monotonic()) / 3)
        by_node = {node: agents.on(node.id, node.host) for node in nodes}
        calls = [a.start(survey_host, subject, timeout_s=limit) for a in by_node.values()]
        replies = dict(zip(nodes, collect_outcomes(calls), strict=True))
        silent = {node: r for node, r in replies.items() if isinstance(r, HostError)}
        answered = {node: r for node, r in replies.items() if node not in silent}
        found = [ok("cluster.hosts", f"{len(answered)} of {len(nodes)} hosts answered")]
        found += merge(_host_findings(silent, answered))
        found += version_findings({node.host: there for node, (_, there) in answered.items()})
        clock_limit = min(CLOCK_REPLY_S, end - time.monotonic())
        found += clock_findings(clock_offsets([by_node[node] for node in answered], clock_limit))
        found += _device_findings(subject, list(answered))
    finally:
        agents.end()
    try:
        return found + _collectives(subject, list(answered), environment, end)
    except Exception as problem:  # a cluster may fall apart meanwhile; keep what is known
        return [*found, _failed("collectives", problem)]


def _resource(subject: Subject) -> str:
    return subject.resource or device.ray_resource(subject.kind)


def _failed(check: str, problem: Exception) -> Finding:
    return error(
        check, describe(problem), "look at the cluster with `ray status` and at Ray's logs"
    )


def _host_findings(
    silent: Mapping[Node, HostError], answered: Mapping[Node, Facts]
) -> Iterator[Finding]:
    """Yield an error per silent host, and each answered host's own findings with its name."""
    remedy = "install the same mindspeed_rlxf there, start Ray there again, or leave it out"
    for node, lost in silent.items():
        yield error("cluster.host", lost.cause, remedy).on(node.host)
    for node, (findings, _) in answered.items():
        yield from (finding.on(node.host) for finding in findings)


def version_findings(by_host: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Return an error per version that differs from that of most hosts; `ok` if none does.

    by_host: host -> package -> version
    """
    check = "cluster.versions"
    found = [
        Finding(
            check,
            Status.ERROR,
            f"{d.name} {d.value}, on {d.others} other hosts {d.expected}",
            "install the same there, and start Ray there again",
            d.hosts,
        )
        for d in installed.find_differences(by_host.items())
    ]
    return found or [ok(check, f"the same on {len(by_host)} hosts")]


def clock_offsets(agents: Sequence[HostAgent], timeout_s: float) -> dict[str, float | None]:
    """Return how many seconds each host's clock is ahead, by host; None = no reply in `timeout_s`.

    All hosts are asked at once, each in a thread. See `_clock_offset` for the accuracy.
    """
    with ThreadPoolExecutor(max(len(agents), 1)) as threads:
        offsets = threads.map(partial(_clock_offset, timeout_s=timeout_s), agents)
        return dict(zip((agent.host for agent in agents), offsets, strict=True))


def _clock_offset(agent: HostAgent, timeout_s: float) -> float | None:
    """Return how many seconds a host's clock is certainly ahead (negative: behind) of this one.

    0 if the difference lies within the round trip of the call; None without a reply.
    """
    before = time.time()
    try:
        there = agent.call(time.time, timeout_s=timeout_s)
    except HostError:
        return None
    after = time.time()
    late = max(before - there, there - after, 0.0)
    return late if there > after else -late


def clock_findings(offsets: Mapping[str, float | None]) -> list[Finding]:
    """Return warnings for clocks over CLOCK_S off and for hosts without a reply; `ok` without any.

    Equal warnings of several hosts are merged into one.
    offsets: host -> seconds ahead of this host; None = no reply
    """
    check, found = "cluster.clock", []
    for host, offset in offsets.items():
        if offset is None:
            found.append(
                warning(check, "answered first, but not later", "look at its load").on(host)
            )
        elif abs(offset) > CLOCK_S:
            found.append(
                warning(
                    check,
                    f"{abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}",
                    "set all clocks by the same server (chrony, ntp)",
                ).on(host)
            )
    return merge(found) or [ok(check, f"within {CLOCK_S:g} s on {len(offsets)} hosts")]


def _device_findings(subject: Subject, nodes: Sequence[Node]) -> list[Finding]:
    """Return a finding per host: a warning if Ray offers fewer devices on it than on another.

    The others are `ok`. Equal findings are merged into one with all hosts; [] on CPU.
    """
    if device.resolve_kind(subject.kind) is DeviceKind.CPU:
        return []
    most, resource = max((node.count for node in nodes), default=0), _resource(subject)
    return merge([ray_finding(resource, node.count, most).on(node.host) for node in nodes])


def _collectives(
    subject: Subject, nodes: Sequence[Node], environment: Mapping[str, str], end: float
) -> list[Finding]:
    """Return findings of all-reduces among new processes on all hosts (`_num_ranks_to_start`).

    The processes are ended. environment: their variables; end: deadline, of `time.monotonic`
    Busy devices are a warning and left out. A process that does not start is an error, and its host
    is left out. Equal findings of several hosts are merged.
    """
    from mindspeed_rlxf.cluster.ray.agent import RayAgent, device_options
    from mindspeed_rlxf.ops.doctor.all_reduce import warm_up
    from mindspeed_rlxf.ops.doctor.ranks import RayRanks

    kind, resource = device.resolve_kind(subject.kind), _resource(subject)
    found: list[Finding] = []
    hosts: list[Party] = []
    processes: list[RayAgent] = []
    ips: list[str] = []
    for node in nodes:
        count, held = _num_ranks_to_start(kind, node), node.count - node.free
        if held:
            found.append(
                warning(
                    "collectives.devices",
                    f"{held} of {held + count} {resource} are held by others",
                    "they are left out; wait for the run that holds them to check them too",
                ).on(node.host)
            )
        if count:
            options = device_options(resource if node.count else None, environment)
            first = len(processes)
            processes += [RayAgent(node.id, node.host, **options) for _ in range(count)]
            ips += [node.ip] * count
            hosts.append(Party(node.host, tuple(range(first, len(processes)))))
    ranks = RayRanks(kind, processes, ips)
    try:
        limit = min(START_S, (end - time.monotonic()) / 2)
        replies = collect_outcomes([each.start(warm_up, timeout_s=limit) for each in processes])
        late = {reply.host for reply in replies if isinstance(reply, HostError)}
        for name in sorted(late):
            found.append(
                error(
                    "collectives.start",
                    "a process does not start",
                    "look at load, memory and Ray's logs there",
                ).on(name)
            )
        ready = [host for host in hosts if host.name not in late]
        return merge(found) + check_collectives(ready, ranks, end - time.monotonic())
    finally:
        ranks.end()


def _num_ranks_to_start(kind: DeviceKind, node: Node) -> int:
    """Return how many ranks to start on a node: one per free device.

    On CPU at most MOST_RANKS_ON_CPU, and 1 if the node declares no resource for devices.
    """
    if kind is not DeviceKind.CPU:
        return node.free
    return min(node.free, MOST_RANKS_ON_CPU) if node.count else 1
