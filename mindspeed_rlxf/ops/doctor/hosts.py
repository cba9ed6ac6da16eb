"""Check every host of a Ray cluster, compare the hosts, and try an all-reduce in each group."""

import os
import platform
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster import nodes as cluster_nodes
from mindspeed_rlxf.cluster.nodes import Node
from mindspeed_rlxf.cluster.ray.cluster import open_cluster
from mindspeed_rlxf.cluster.worker import forwarded_environment
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.secrets import reveal
from mindspeed_rlxf.device import npu_versions, worlds
from mindspeed_rlxf.device.findings import Finding, Status, error, judge, ok, warning
from mindspeed_rlxf.ops.doctor.checks import Subject, check_host, describe
from mindspeed_rlxf.ops.doctor.output import merge

SURVEY_S = 90.0  # checks of a host take 65 at most, its process some to start
GROUP_S = 90.0  # processes start, import torch, open devices
MARGIN_S = 5.0  # a rank's deadline is earlier than the driver's, as its message has more detail
MOST_RANKS_ON_CPU = 8
SHOWN = 8


def survey_host(subject: Subject) -> tuple[list[Finding], dict[str, str]]:
    """Run the checks of this host; return its findings and its versions."""
    return check_host(subject), versions()


def versions() -> dict[str, str]:
    """Return name -> version of what must be equal on all hosts: packages, `python`, `cann`."""
    cann = npu_versions.cann_version() or cluster_nodes.NONE
    found = cluster_nodes.versions(npu_versions.PACKAGES)
    return {**found, "python": platform.python_version(), "cann": cann}


def check_cluster(subject: Subject, address: str | None) -> list[Finding]:
    """Join a Ray cluster, return findings on its hosts and collectives, and leave it.

    Sets environment variables of Ray.

    Args:
        address: None = RAY_ADDRESS.

    Raises:
        UserError: no cluster is named, or it cannot be joined.
    """
    if (address or os.environ.get("RAY_ADDRESS") or "local") == "local":
        remedy = "set RAY_ADDRESS, runtime.address or --address; auto is one that runs on this host"
        raise UserError(
            Problem("--cluster", "needs a Ray cluster and none is named", remedy=remedy)
        )
    cluster = open_cluster(address, {})
    found: list[Finding] = []
    try:
        _check_joined(subject, found)
    except Exception as problem:  # a cluster may fall apart meanwhile; keep what is known
        remedy = "look at the cluster with `ray status` and at Ray's logs"
        found.append(error("cluster", describe(problem), remedy))
    finally:
        cluster.close()
    return found


def _check_joined(subject: Subject, found: list[Finding]) -> None:
    """Check each host, compare the hosts, and all-reduce; append to `found`."""
    # Imported after Ray's environment is set.
    from mindspeed_rlxf.cluster.ray.node_tools import Failed, Task, live_nodes, run_tasks

    kind = device.resolve_kind(subject.kind)
    resource = subject.resource or device.facts(kind).ray_resource
    nodes = live_nodes(resource)
    forwarded = forwarded_environment(os.environ).items()
    environment = reveal({name: value for name, value in forwarded if value.is_open})
    replies = run_tasks([Task(n.id, survey_host, (subject,)) for n in nodes], environment, SURVEY_S)
    answered: dict[Node, dict[str, str]] = {}
    own: list[Finding] = []
    for node, reply in zip(nodes, replies, strict=True):
        if isinstance(reply, Failed):
            remedy = "install the same mindspeed_rlxf there, start Ray there again, or exclude it"
            own.append(error("cluster.host", reply.cause, remedy).on(node.host))
            continue
        findings, answered[node] = reply
        own += [finding.on(node.host) for finding in findings]
        if kind is not DeviceKind.CPU:
            own.append(ray_finding(resource, node.count, max(n.count for n in nodes)).on(node.host))
    found += [ok("cluster.hosts", f"{len(answered)} of {len(nodes)} hosts answered"), *merge(own)]
    found += version_findings({node.host: there for node, there in answered.items()})
    found += _check_collectives(kind, resource, list(answered), environment)


def ray_finding(resource: str, count: int, most: int) -> Finding:
    """Warn if Ray offers fewer devices on a host (`count`) than on another one (`most`)."""
    return judge(
        count == most,
        "devices.ray",
        f"Ray offers {count} {resource}, other hosts up to {most}",
        f"`ray start ... --resources='{{\"{resource}\": {most}}}'` on this host",
    )


def version_findings(by_host: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Return an error per version that differs from that of most hosts; `ok` if none does.

    Args:
        by_host: host -> package -> version.
    """
    check, remedy = "cluster.versions", "install the same there, and start Ray there again"
    names = dict.fromkeys(name for there in by_host.values() for name in there)
    counts = {n: Counter(v.get(n, cluster_nodes.NONE) for v in by_host.values()) for n in names}
    usual = {name: count.most_common(1)[0][0] for name, count in counts.items()}
    odd = defaultdict[str, list[str]](list)
    for host, there in by_host.items():
        for name, value, wanted in cluster_nodes.find_differences(there, usual):
            odd[f"{name} {value}, on most hosts {wanted}"].append(host)
    found = [Finding(check, Status.ERROR, value, remedy, tuple(odd[value])) for value in odd]
    return found or [ok(check, f"the same on {len(by_host)} hosts")]


def _check_collectives(
    kind: DeviceKind, resource: str, nodes: Sequence[Node], environment: Mapping[str, str]
) -> list[Finding]:
    """All-reduce over the free devices inside each host, then over all hosts where that works.

    On CPU with MOST_RANKS_ON_CPU ranks on a host at most, and 1 if it declares no devices.
    """
    found, groups = [], []
    for node in nodes:
        count = node.free
        if kind is DeviceKind.CPU:
            count = min(node.free, MOST_RANKS_ON_CPU) if node.count else 1
        groups += [[node] * count] if count else []
        if held := node.count - node.free:
            value = f"{held} of {node.count} {resource} are held by others and not tried"
            remedy = "wait for the run that holds them to check them too"
            found.append(warning("collectives.devices", value, remedy).on(node.host))
    causes = _all_reduce(kind, resource, groups, environment)
    remedy = "look at the devices and the library's log there, or exclude the host"
    for group, cause in zip(groups, causes, strict=True):
        if cause:
            found.append(error("collectives.inside", cause, remedy).on(group[0].host))
    working = [group for group, cause in zip(groups, causes, strict=True) if not cause]
    value = f"{len(working)} of {len(groups)} hosts"
    if working:
        found.append(ok("collectives.inside", value))
    if len(working) > 1:
        together = [node for group in working for node in group]
        (cause,) = _all_reduce(kind, resource, [together], environment)
        value += f" together: {cause}" if cause else " together"
        remedy = "look at network, firewall and GLOO/HCCL_SOCKET_IFNAME, at `ulimit -n` and ports"
        found.append(judge(not cause, "collectives.all", value, remedy, Status.ERROR))
    return merge(found)


def _all_reduce(
    kind: DeviceKind,
    resource: str,
    groups: Sequence[Sequence[Node]],
    environment: Mapping[str, str],
    limit_s: float = GROUP_S,
) -> list[str]:
    """All-reduce in all groups at once; return the cause of each group's failure, "" if it passed.

    groups: the node of each rank
    """
    import ray

    from mindspeed_rlxf.cluster.ray.node_tools import Failed, Task, run_tasks
    from mindspeed_rlxf.ops.doctor.all_reduce import all_reduce, arrival_key

    ip = str(ray.util.get_node_ip_address())
    stores, tasks = [], []
    for group in groups:
        store, port = worlds.open_store(ip)
        stores.append(store)
        for rank, node in enumerate(group):
            arguments = (kind, ip, port, rank, len(group), limit_s - MARGIN_S)
            tasks.append(Task(node.id, all_reduce, arguments, resource if node.count else None))
    replies = iter(run_tasks(tasks, environment, limit_s))
    found = []
    for group, store in zip(groups, stores, strict=True):
        results = [next(replies) for _ in group]
        causes = [reply.cause for reply in results if isinstance(reply, Failed)]
        causes += [reply for reply in results if not isinstance(reply, Failed) and reply]
        absent = [
            f"rank {rank} on {node.host}"
            for rank, node in enumerate(group)
            if not store.check([arrival_key(rank)])
        ]
        parts = [f"{', '.join(absent[:SHOWN])} never came"] if absent else []
        found.append("; ".join(parts + causes[:1]) if causes else "")
    return found
