"""Every host of a Ray cluster: the checks of each, what differs between them, collectives."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.device import version_sets
from mindspeed_rlxf.doctor import local
from mindspeed_rlxf.doctor.collectives import check_collectives
from mindspeed_rlxf.doctor.devices import ray_finding
from mindspeed_rlxf.doctor.findings import Finding, Status, error, merged, ok, warning
from mindspeed_rlxf.doctor.hunt import Party
from mindspeed_rlxf.doctor.subject import Subject
from mindspeed_rlxf.runtime.environment import forwarded_environment
from mindspeed_rlxf.runtime.installed import build
from mindspeed_rlxf.runtime.ray_cluster import open_cluster

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
    found = {name: version or "none" for name, version in version_sets.installed().items()}
    cann = version_sets.cann_version() or "none"
    own = {"mindspeed_rlxf": build(), "python": platform.python_version()}
    return {**own, "cann": cann, **found}


def look(subject: Subject, address: str | None, deadline_s: float) -> list[Finding]:
    """Joins the cluster, looks and leaves. Raises UserError when there is none to join."""
    end = time.monotonic() + deadline_s
    if (address or os.environ.get("RAY_ADDRESS") or "local") == "local":
        raise UserError(
            "--cluster needs a Ray cluster and none is named; set RAY_ADDRESS, runtime.address or "
            "--address, for example to auto for one that runs on this host"
        )
    try:
        cluster = open_cluster(address, {})
    except RuntimeError as problem:  # versions of Ray or Python that differ, among others
        return [_broken("cluster.join", problem)]
    try:
        return _look(subject, end)
    finally:
        cluster.close()


def _look(subject: Subject, end: float) -> list[Finding]:
    from mindspeed_rlxf.runtime import ray_survey  # only now: Ray reads its environment

    nodes = ray_survey.nodes()
    environment = forwarded_environment(os.environ)
    options = ray_survey.device_options(None, environment)
    surveyors = [ray_survey.start(node, options) for node in nodes]
    try:
        limit = min(SURVEY_S, (end - time.monotonic()) / 3)
        replies = ray_survey.gather([each.call(facts, subject) for each in surveyors], limit)
        found, answered, by_host = _sort(nodes, replies)
        found += drift(by_host)
        there = [each for each in surveyors if each.node in answered]
        offsets = ray_survey.clock_offsets(there, min(CLOCK_REPLY_S, end - time.monotonic()))
        names = [each.node.name for each in there]
        found += clock_findings(dict(zip(names, offsets, strict=True)))
        found += _resource_findings(subject, answered)
    finally:
        for each in surveyors:
            each.end()
    try:
        return found + _collectives(subject, answered, environment, end)
    except Exception as problem:  # a cluster may fall apart under it; what is known stays
        return [*found, _broken("collectives", problem)]


def _broken(check: str, problem: Exception) -> Finding:
    said = " ".join(str(problem).split())[:300]
    remedy = "look at the cluster with `ray status` and at Ray's logs"
    return error(check, f"{type(problem).__name__}: {said}", remedy)


def _sort(
    nodes: Sequence[Any], replies: Sequence[Any]
) -> tuple[list[Finding], list[Any], dict[str, dict[str, str]]]:
    """Findings of all hosts, the nodes that answered, and the versions by host."""
    from mindspeed_rlxf.runtime.ray_survey import cause, is_failure

    found: list[Finding] = []
    answered, by_host = [], {}
    for node, reply in zip(nodes, replies, strict=True):
        if is_failure(reply):
            remedy = "install the same mindspeed_rlxf there, start Ray there again, or leave it out"
            found.append(error("cluster.host", cause(reply), remedy).on(node.name))
            continue
        findings, by_host[node.name] = reply
        found += [finding.on(node.name) for finding in findings]
        answered.append(node)
    count = f"{len(answered)} of {len(nodes)} hosts answered"
    return [ok("cluster.hosts", count), *merged(found)], answered, by_host


def drift(by_host: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Hosts whose versions are not those of most hosts."""
    names = dict.fromkeys(name for versions in by_host.values() for name in versions)
    findings = []
    for name in names:
        values = {host: versions.get(name, "none") for host, versions in by_host.items()}
        usual, count = Counter(values.values()).most_common(1)[0]
        others: dict[str, list[str]] = {}
        for host, value in values.items():
            if value != usual:
                others.setdefault(value, []).append(host)
        for value, hosts in others.items():
            text = f"{name} {value}, on {count} other hosts {usual}"
            remedy = "install the same there, and start Ray there again"
            found = Finding("cluster.versions", Status.ERROR, text, remedy, tuple(hosts))
            findings.append(found)
    return findings or [ok("cluster.versions", f"the same on {len(by_host)} hosts")]


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


def _resource_findings(subject: Subject, nodes: Sequence[Any]) -> list[Finding]:
    """Devices that Ray offers on each host; the hosts with most devices say how many."""
    kind = device.resolve_kind(subject.kind)
    if kind is DeviceKind.CPU:
        return []
    resource = subject.resource or device.ray_resource(kind)
    most = max((int(node.resources.get(resource, 0)) for node in nodes), default=0)
    return merged([ray_finding(kind, node.resources, most).on(node.name) for node in nodes])


def _collectives(
    subject: Subject, nodes: Sequence[Any], environment: Mapping[str, str], end: float
) -> list[Finding]:
    """Processes on the free devices of all hosts, and the hunt among them."""
    from mindspeed_rlxf.doctor.all_reduce import warm_up
    from mindspeed_rlxf.doctor.ranks import RayRanks
    from mindspeed_rlxf.runtime import ray_survey

    kind = device.resolve_kind(subject.kind)
    resource = subject.resource or device.ray_resource(kind)
    found: list[Finding] = []
    hosts: list[Party] = []
    processes: list[Any] = []
    for node in nodes:
        count, held = _free_devices(kind, resource, node)
        if held:
            value = f"{held} of {held + count} {resource} are held by others"
            remedy = "they are left out; wait for the run that holds them to check them too"
            found.append(warning("collectives.devices", value, remedy).on(node.name))
        if count:
            own = resource if node.resources.get(resource) else None
            options = ray_survey.device_options(own, environment)
            first = len(processes)
            processes += [ray_survey.start(node, options) for _ in range(count)]
            hosts.append(Party(node.name, tuple(range(first, len(processes)))))
    ranks = RayRanks(kind, processes)
    try:
        limit = min(START_S, (end - time.monotonic()) / 2)
        replies = ray_survey.gather([each.call(warm_up) for each in processes], limit)
        late = {
            process.node.name
            for process, reply in zip(processes, replies, strict=True)
            if ray_survey.is_failure(reply)
        }
        for name in sorted(late):
            remedy = "look at load, memory and Ray's logs there"
            found.append(error("collectives.start", "a process does not start", remedy).on(name))
        ready = [host for host in hosts if host.name not in late]
        return merged(found) + check_collectives(ready, ranks, end - time.monotonic())
    finally:
        ranks.end()


def _free_devices(kind: DeviceKind, resource: str, node: Any) -> tuple[int, int]:
    """Devices of a node that are free, and that others hold. On CPU one where none is declared."""
    there, free = (int(of.get(resource, 0)) for of in (node.resources, node.free))
    if kind is DeviceKind.CPU:
        return (min(free, MOST_RANKS_ON_CPU), there - free) if there else (1, 0)
    return free, there - free
