"""Every host of a Ray cluster: the checks of each, what differs between them, collectives."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster import installed
from mindspeed_rlxf.cluster.environment import forwarded_environment
from mindspeed_rlxf.cluster.errors import HostError
from mindspeed_rlxf.cluster.host_agent import HostAgent, outcomes
from mindspeed_rlxf.cluster.nodes import Node
from mindspeed_rlxf.cluster.ray.cluster import open_cluster
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.withheld import open_variables
from mindspeed_rlxf.device import version_sets
from mindspeed_rlxf.ops.doctor import local
from mindspeed_rlxf.ops.doctor.collectives import check_collectives
from mindspeed_rlxf.ops.doctor.devices import ray_finding
from mindspeed_rlxf.ops.doctor.findings import Finding, Status, error, merged, ok, warning
from mindspeed_rlxf.ops.doctor.hunt import Party
from mindspeed_rlxf.ops.doctor.subject import Subject

SURVEY_S = 90.0  # checks of a host take 65 at most, its first process some to start
START_S = 60.0  # processes of the ranks, which import torch
CLOCK_S, CLOCK_REPLY_S = 1.0, 3.0
MOST_RANKS_ON_CPU = 8

Facts = tuple[list[Finding], dict[str, str]]


def facts(subject: Subject) -> Facts:
    """Of the host it runs on: findings, and versions by name."""
    return local.look(subject), versions()


def versions() -> dict[str, str]:
    """What has to be the same everywhere."""
    cann = version_sets.cann_version() or installed.NONE
    found = installed.versions(version_sets.PACKAGES)
    return {**found, "python": platform.python_version(), "cann": cann}


def look(
    subject: Subject, address: str | None, deadline_s: float, allow_unauthenticated: bool = False
) -> list[Finding]:
    """Joins the cluster, looks and leaves. Raises UserError when there is none to join."""
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
    except RuntimeError as problem:  # versions of Ray or Python that differ, among others
        return [_broken("cluster.join", problem)]
    try:
        return _look(subject, end)
    finally:
        cluster.close()


def _look(subject: Subject, end: float) -> list[Finding]:
    from mindspeed_rlxf.cluster.ray.agent import RayAgents, live_nodes  # after Ray's environment

    nodes = live_nodes(_resource(subject))
    environment = open_variables(forwarded_environment(os.environ))
    agents = RayAgents(environment)
    try:
        limit = min(SURVEY_S, (end - time.monotonic()) / 3)
        by_node = {node.id: agents.on(node.id, node.host) for node in nodes}
        calls = [agent.start(facts, subject, timeout_s=limit) for agent in by_node.values()]
        found, answered, by_host = _sort(nodes, outcomes(calls))
        found += drift(by_host)
        there = [by_node[node.id] for node in answered]
        found += clock_findings(clock_offsets(there, min(CLOCK_REPLY_S, end - time.monotonic())))
        found += _resource_findings(subject, answered)
    finally:
        agents.end()
    try:
        return found + _collectives(subject, answered, environment, end)
    except Exception as problem:  # a cluster may fall apart under it; what is known stays
        return [*found, _broken("collectives", problem)]


def _resource(subject: Subject) -> str:
    return subject.resource or device.ray_resource(device.resolve_kind(subject.kind))


def _broken(check: str, problem: Exception) -> Finding:
    said = " ".join(str(problem).split())[:300]
    remedy = "look at the cluster with `ray status` and at Ray's logs"
    return error(check, f"{type(problem).__name__}: {said}", remedy)


def _sort(
    nodes: Sequence[Node], replies: Sequence[Facts | HostError]
) -> tuple[list[Finding], list[Node], dict[str, dict[str, str]]]:
    """Findings of all hosts, the nodes that answered, and the versions by host."""
    found: list[Finding] = []
    answered, by_host = [], {}
    for node, reply in zip(nodes, replies, strict=True):
        if isinstance(reply, HostError):
            remedy = "install the same mindspeed_rlxf there, start Ray there again, or leave it out"
            found.append(error("cluster.host", reply.cause, remedy).on(node.host))
            continue
        findings, by_host[node.host] = reply
        found += [finding.on(node.host) for finding in findings]
        answered.append(node)
    count = f"{len(answered)} of {len(nodes)} hosts answered"
    return [ok("cluster.hosts", count), *merged(found)], answered, by_host


def drift(by_host: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Hosts whose versions are not those of most hosts."""
    remedy = "install the same there, and start Ray there again"
    findings = [
        Finding(
            "cluster.versions",
            Status.ERROR,
            f"{d.name} {d.value}, on {d.others} other hosts {d.expected}",
            remedy,
            d.hosts,
        )
        for d in installed.differences(by_host.items())
    ]
    return findings or [ok("cluster.versions", f"the same on {len(by_host)} hosts")]


def clock_offsets(agents: Sequence[HostAgent], timeout_s: float) -> dict[str, float | None]:
    """By host: seconds that its clock is ahead, within its round trip; None = no reply.

    All are asked at the same time, each by a thread: waiting for a host that is silent would hide
    what the others are off by.
    """
    with ThreadPoolExecutor(max(len(agents), 1)) as threads:
        offsets = threads.map(partial(_offset, timeout_s=timeout_s), agents)
        return dict(zip((agent.host for agent in agents), offsets, strict=True))


def _offset(agent: HostAgent, timeout_s: float) -> float | None:
    before = time.time()
    try:
        there = agent.call(time.time, timeout_s=timeout_s)
    except HostError:
        return None
    after = time.time()
    late = max(before - there, there - after, 0.0)
    return late if there > after else -late


def clock_findings(offsets: Mapping[str, float | None]) -> list[Finding]:
    """offsets: seconds ahead of the host of the command; None = no reply."""
    found = []
    for host, offset in offsets.items():
        if offset is None:
            remedy = "look at its load"
            value = "answered once, and then no more"
            found.append(warning("cluster.clock", value, remedy).on(host))
        elif abs(offset) > CLOCK_S:
            value = f"{abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}"
            remedy = "set all clocks by the same server (chrony, ntp)"
            found.append(warning("cluster.clock", value, remedy).on(host))
    return merged(found) or [ok("cluster.clock", f"within {CLOCK_S:g} s on {len(offsets)} hosts")]


def _resource_findings(subject: Subject, nodes: Sequence[Node]) -> list[Finding]:
    """Devices that Ray offers on each host; the hosts with most devices say how many."""
    kind = device.resolve_kind(subject.kind)
    if kind is DeviceKind.CPU:
        return []
    most = max((node.count for node in nodes), default=0)
    return merged(
        [ray_finding(_resource(subject), node.count, most).on(node.host) for node in nodes]
    )


def _collectives(
    subject: Subject, nodes: Sequence[Node], environment: Mapping[str, str], end: float
) -> list[Finding]:
    """Processes on the free devices of all hosts, and the hunt among them."""
    from mindspeed_rlxf.cluster.ray.agent import RayAgent, device_options
    from mindspeed_rlxf.ops.doctor.all_reduce import warm_up
    from mindspeed_rlxf.ops.doctor.ranks import RayRanks

    kind, resource = device.resolve_kind(subject.kind), _resource(subject)
    found: list[Finding] = []
    hosts: list[Party] = []
    processes: list[RayAgent] = []
    ips: list[str] = []
    for node in nodes:
        count, held = _free_devices(kind, node)
        if held:
            value = f"{held} of {held + count} {resource} are held by others"
            remedy = "they are left out; wait for the run that holds them to check them too"
            found.append(warning("collectives.devices", value, remedy).on(node.host))
        if count:
            options = device_options(resource if node.count else None, environment)
            first = len(processes)
            processes += [RayAgent(node.id, node.host, **options) for _ in range(count)]
            ips += [node.ip] * count
            hosts.append(Party(node.host, tuple(range(first, len(processes)))))
    ranks = RayRanks(kind, processes, ips)
    try:
        limit = min(START_S, (end - time.monotonic()) / 2)
        replies = outcomes([each.start(warm_up, timeout_s=limit) for each in processes])
        late = {reply.host for reply in replies if isinstance(reply, HostError)}
        for name in sorted(late):
            remedy = "look at load, memory and Ray's logs there"
            found.append(error("collectives.start", "a process does not start", remedy).on(name))
        ready = [host for host in hosts if host.name not in late]
        return merged(found) + check_collectives(ready, ranks, end - time.monotonic())
    finally:
        ranks.end()


def _free_devices(kind: DeviceKind, node: Node) -> tuple[int, int]:
    """Devices of a node that are free, and that others hold. On CPU one where none is declared."""
    if kind is DeviceKind.CPU:
        if not node.count:
            return 1, 0
        return min(node.free, MOST_RANKS_ON_CPU), node.count - node.free
    return node.free, node.count - node.free
