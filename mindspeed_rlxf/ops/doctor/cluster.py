"""Check every host of a Ray cluster, compare the hosts, and try an all-reduce in each group."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster import installed
from mindspeed_rlxf.cluster.environment import forwarded_environment
from mindspeed_rlxf.cluster.nodes import Node
from mindspeed_rlxf.cluster.ray.cluster import open_cluster
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.secrets import reveal
from mindspeed_rlxf.device import npu_versions
from mindspeed_rlxf.ops.doctor.checks import Subject, check_host
from mindspeed_rlxf.ops.doctor.report import (
    Finding,
    Status,
    describe,
    error,
    judge,
    merge,
    ok,
    warning,
)

SURVEY_S = 90.0  # checks of a host take 65 at most, its process some to start
GROUP_S = 90.0  # processes start, import torch, open devices
MARGIN_S = 5.0  # a rank's deadline is earlier than the driver's, as its message has more detail
MOST_RANKS_ON_CPU = 8
SHOWN = 8

Facts = tuple[list[Finding], dict[str, str]]


def survey_host(subject: Subject) -> Facts:
    """Run the checks of the host that this process is on; return its findings and its versions."""
    return check_host(subject), versions()


def versions() -> dict[str, str]:
    """Return name -> version of what must be equal on all hosts: packages, `python`, `cann`."""
    cann = npu_versions.cann_version() or installed.NONE
    found = installed.versions(npu_versions.PACKAGES)
    return {**found, "python": platform.python_version(), "cann": cann}


def check_cluster(subject: Subject, address: str | None, deadline_s: float) -> list[Finding]:
    """Join a Ray cluster, return findings on its hosts and collectives, and leave it.

    address:    None = RAY_ADDRESS
    deadline_s: of all checks; joining the cluster is not limited by it
    Sets environment variables of Ray. Raises UserError when no cluster is named, or it cannot be
    joined.
    """
    if (address or os.environ.get("RAY_ADDRESS") or "local") == "local":
        raise UserError(
            Problem(
                "--cluster",
                "needs a Ray cluster and none is named",
                remedy="set RAY_ADDRESS, runtime.address or --address, for example to auto for "
                "one that runs on this host",
            )
        )
    cluster = open_cluster(address, {})
    found: list[Finding] = []
    try:
        _check_joined(subject, time.monotonic() + deadline_s, found)
    except Exception as problem:  # a cluster may fall apart meanwhile; keep what is known
        remedy = "look at the cluster with `ray status` and at Ray's logs"
        found.append(error("cluster", describe(problem), remedy))
    finally:
        cluster.close()
    return found


def _check_joined(subject: Subject, end: float, found: list[Finding]) -> None:
    """Check each host, compare the hosts, and all-reduce; append to `found`.

    end: deadline, of `time.monotonic`
    """
    # Imported after Ray's environment is set.
    from mindspeed_rlxf.cluster.ray.tasks import Failed, Task, live_nodes, run_tasks

    kind = device.resolve_kind(subject.kind)
    resource = subject.resource or device.ray_resource(kind)
    nodes = live_nodes(resource)
    forwarded = forwarded_environment(os.environ).items()
    environment = reveal({name: value for name, value in forwarded if value.is_open})
    limit = min(SURVEY_S, (end - time.monotonic()) / 2)
    tasks = [Task(node.id, survey_host, (subject,)) for node in nodes]
    replies = dict(zip(nodes, run_tasks(tasks, environment, limit), strict=True))
    answered = {node: r for node, r in replies.items() if not isinstance(r, Failed)}
    found.append(ok("cluster.hosts", f"{len(answered)} of {len(nodes)} hosts answered"))
    own = [finding.on(node.host) for node, (all_, _) in answered.items() for finding in all_]
    remedy = "install the same mindspeed_rlxf there, start Ray there again, or exclude it"
    for node, reply in replies.items():
        if node not in answered:
            own.append(error("cluster.host", reply.cause, remedy).on(node.host))
    if kind is not DeviceKind.CPU:
        most = max((node.count for node in nodes), default=0)
        own += [_ray_finding(resource, node.count, most).on(node.host) for node in answered]
    found += merge(own)
    found += version_findings({node.host: there for node, (_, there) in answered.items()})
    found += _check_collectives(kind, resource, list(answered), environment, end)


def _ray_finding(resource: str, count: int, most: int) -> Finding:
    """Warn if Ray offers fewer devices on a host (`count`) than on another one (`most`)."""
    return judge(
        count == most,
        "devices.ray",
        f"Ray offers {count} {resource}, other hosts up to {most}",
        f"`ray start ... --resources='{{\"{resource}\": {most}}}'` on this host",
    )


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


def _check_collectives(
    kind: DeviceKind,
    resource: str,
    nodes: Sequence[Node],
    environment: Mapping[str, str],
    end: float,
) -> list[Finding]:
    """All-reduce over the free devices inside each host, then over all hosts where that works.

    On CPU with MOST_RANKS_ON_CPU ranks on a host at most, and 1 if it declares no devices.
    """
    found: list[Finding] = []
    ranks: dict[Node, int] = {}
    for node in nodes:
        ranks[node] = node.free
        if kind is DeviceKind.CPU:
            ranks[node] = min(node.free, MOST_RANKS_ON_CPU) if node.count else 1
        if held := node.count - node.free:
            value = f"{held} of {node.count} {resource} are held by others and not tried"
            remedy = "wait for the run that holds them to check them too"
            found.append(warning("collectives.devices", value, remedy).on(node.host))
    groups = [[node] * count for node, count in ranks.items() if count]
    causes = _all_reduce(kind, resource, groups, environment, (end - time.monotonic()) / 2)
    remedy = "look at the devices and the library's log there, or exclude the host"
    for group, cause in zip(groups, causes, strict=True):
        if cause:
            found.append(error("collectives.inside", cause, remedy).on(group[0].host))
    working = [group for group, cause in zip(groups, causes, strict=True) if not cause]
    if working:
        value = f"{len(working)} of {len(groups)} hosts"
        found.append(ok("collectives.inside", value))
    if len(working) > 1:
        together = [node for group in working for node in group]
        left = end - time.monotonic()
        (cause,) = _all_reduce(kind, resource, [together], environment, left)
        value = f"{len(working)} of {len(groups)} hosts together"
        remedy = "look at network, firewall and GLOO/HCCL_SOCKET_IFNAME, at `ulimit -n` and ports"
        value += f": {cause}" if cause else ""
        found.append(judge(not cause, "collectives.all", value, remedy, Status.ERROR))
    return merge(found)


def _all_reduce(
    kind: DeviceKind,
    resource: str,
    groups: Sequence[Sequence[Node]],
    environment: Mapping[str, str],
    limit_s: float,
) -> list[str]:
    """All-reduce in all groups at once; return the cause of each group's failure, "" if it passed.

    groups: the node of each rank; limit_s: at most GROUP_S are used
    """
    from mindspeed_rlxf.cluster.ray.tasks import Failed, Task, node_address, run_tasks
    from mindspeed_rlxf.ops.doctor.all_reduce import Meeting, Rank, all_reduce

    ip, limit_s = node_address(), min(GROUP_S, limit_s)
    patience_s = max(limit_s - MARGIN_S, 1)
    meetings = [Meeting(ip, len(group)) for group in groups]
    tasks = []
    for group, meeting in zip(groups, meetings, strict=True):
        for i, node in enumerate(group):
            rank = Rank(kind, ip, meeting.port, i, len(group), patience_s)
            tasks.append(Task(node.id, all_reduce, (rank,), resource if node.count else None))
    replies = iter(run_tasks(tasks, environment, limit_s))
    found = []
    for group, meeting in zip(groups, meetings, strict=True):
        own = [next(replies) for _ in group]
        absent = [f"rank {rank} on {group[rank].host}" for rank in meeting.absent()]
        failed = [reply.cause for reply in own if isinstance(reply, Failed)]
        causes = failed + [reply for reply in own if not isinstance(reply, Failed) and reply]
        parts = [f"{', '.join(absent[:SHOWN])} never came"] if absent else []
        found.append("; ".join(parts + causes[:1]) if causes else "")
    return found
