"""Check every Ray host, compare the hosts, and try an all-reduce in each group."""

import os
import platform
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster import nodes as cluster_nodes
from mindspeed_rlxf.cluster.nodes import Node
from mindspeed_rlxf.cluster.ray.cluster import open_cluster
from mindspeed_rlxf.cluster.worker import forwarded_environment
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.secrets import reveal
from mindspeed_rlxf.device import npu_versions, worlds
from mindspeed_rlxf.device.findings import Finding, Status, error, judge, ok
from mindspeed_rlxf.ops.doctor.checks import Subject, check_host
from mindspeed_rlxf.ops.doctor.output import merge

SURVEY_S = 120.0  # torch of an NPU may load for 40 s, and npu-smi take 20 s
GROUP_S = 90.0  # processes start, import torch, open devices


def check_cluster(subject: Subject, address: str | None) -> list[Finding]:
    """Join a Ray cluster (RAY_ADDRESS if None), check its hosts and collectives, and leave it.

    Sets Ray's environment variables.

    Raises:
        UserError: No cluster is named, or joining it fails.
    """
    if (address or os.environ.get("RAY_ADDRESS") or "local") == "local":
        raise UserError(
            Problem(
                "--cluster",
                "needs a Ray cluster and none is named",
                remedy="set RAY_ADDRESS, runtime.address or --address; auto is one that runs on "
                "this host",
            )
        )
    cluster = open_cluster(address, {})
    try:
        return _check_joined(subject)
    finally:
        cluster.close()


def survey_host(subject: Subject) -> tuple[list[Finding], dict[str, str]]:
    """Return this host's findings, and the versions that must be equal everywhere, by name."""
    versions = cluster_nodes.versions(npu_versions.PACKAGES)
    cann = npu_versions.cann_version() or cluster_nodes.NONE
    return check_host(subject), {**versions, "python": platform.python_version(), "cann": cann}


def _check_joined(subject: Subject) -> list[Finding]:
    """Check each host, compare the hosts, and all-reduce."""
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
    return [
        ok("cluster.hosts", f"{len(answered)} of {len(nodes)} hosts answered"),
        *merge(own),
        *version_findings({node.host: there for node, there in answered.items()}),
        *_check_collectives(kind, resource, list(answered), environment),
    ]


def ray_finding(resource: str, count: int, most: int) -> Finding:
    """Warn if Ray offers fewer devices here (`count`) than on another host (`most`)."""
    return judge(
        count == most,
        "devices.ray",
        f"Ray offers {count} {resource}, other hosts up to {most}",
        f"`ray start ... --resources='{{\"{resource}\": {most}}}'` on this host",
    )


def version_findings(by_host: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Report each version that differs from most hosts as an error; else return one `ok`."""
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
    """All-reduce over the free devices inside each host, then over all hosts that passed.

    On CPU with at most eight ranks on a host, and one if it declares no devices.
    """
    groups = []
    for node in nodes:
        count = node.free
        if kind is DeviceKind.CPU:
            count = min(node.free, 8) if node.count else 1
        groups += [[node] * count] if count else []
    causes = _all_reduce_groups(kind, resource, groups, environment)
    remedy = "look at the devices and the library's log there, or exclude the host"
    found = [
        error("collectives.inside", cause, remedy).on(group[0].host)
        for group, cause in zip(groups, causes, strict=True)
        if cause
    ]
    working = [group for group, cause in zip(groups, causes, strict=True) if not cause]
    together = [node for group in working for node in group]
    value = f"{len(together)} ranks on {len(working)} of {len(nodes)} hosts"
    if working:
        found.append(ok("collectives.inside", value))
    if len(working) > 1:
        (cause,) = _all_reduce_groups(kind, resource, [together], environment)
        value += f" together: {cause}" if cause else " together"
        remedy = "look at network, firewall and GLOO/HCCL_SOCKET_IFNAME, at `ulimit -n` and ports"
        found.append(judge(not cause, "collectives.all", value, remedy, Status.ERROR))
    return merge(found)


def _all_reduce_groups(
    kind: DeviceKind,
    resource: str,
    groups: Sequence[Sequence[Node]],
    environment: Mapping[str, str],
) -> list[str]:
    """All-reduce in all groups at once; return each group's failure, "" if it passed.

    A group lists each rank's node.
    """
    from mindspeed_rlxf.cluster.ray.node_tools import Failed, Task, driver_address, run_tasks

    ip = driver_address()
    stores, tasks = [], []
    for group in groups:
        store, port = worlds.open_store(ip)
        stores.append(store)
        for rank, node in enumerate(group):
            # A rank's deadline is earlier than the driver's, as its message has more detail.
            arguments = (kind, ip, port, rank, len(group), GROUP_S - 5.0)
            tasks.append(Task(node.id, all_reduce, arguments, resource if node.count else None))
    replies = iter(run_tasks(tasks, environment, GROUP_S))
    found = []
    for group, store in zip(groups, stores, strict=True):
        results = [next(replies) for _ in group]
        causes = [each.cause if isinstance(each, Failed) else each for each in results]
        absent = [
            f"rank {rank} on {node.host}"
            for rank, node in enumerate(group)
            if not store.check([arrival_key(rank)])
        ]
        parts = [f"{', '.join(absent[:8])} never came"] if absent else []
        found.append("; ".join(parts + [cause for cause in causes if cause][:1]))
    return found


def arrival_key(rank: int) -> str:
    """Return the key that a rank sets in its group's store on arrival."""
    return f"here/{rank}"


def all_reduce(
    kind: DeviceKind, ip: str, port: int, rank: int, world_size: int, timeout_s: float
) -> str:
    """Join the process group, all-reduce 4 MiB four times, and leave the group.

    Ranks meet at the TCPStore `ip`:`port`, and wait for each other up to `timeout_s` in each step.

    Returns:
        "" if the sums are right, else the failure.
    """
    try:
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(ip, port, is_master=False, timeout=timeout)
        store.set(arrival_key(rank), "")
        place = device.select_first_device(kind)
        dist.init_process_group(
            device.facts(kind).backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        wanted = world_size * (world_size + 1) // 2  # 1 + 2 + ... + world_size
        elements = torch.empty(2**20, device=place)
        for _ in range(4):
            elements.fill_(rank + 1)
            dist.all_reduce(elements)
            if not bool((elements == wanted).all()):
                raise ValueError(
                    f"the sum is wrong: {elements.min():g} to {elements.max():g}, not {wanted}"
                )
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
