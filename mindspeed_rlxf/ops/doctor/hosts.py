"""Check every Ray host, compare the hosts, and try an all-reduce in each group."""

import itertools
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
    max_devices = max((node.count for node in nodes), default=0)
    versions: dict[Node, dict[str, str]] = {}  # of the hosts that answered
    host_findings: list[Finding] = []
    for node, reply in zip(nodes, replies, strict=True):
        if isinstance(reply, Failed):
            remedy = "install the same mindspeed_rlxf there, start Ray there again, or exclude it"
            host_findings.append(error("cluster.host", reply.cause, remedy).on(node.host))
            continue
        findings, versions[node] = reply
        host_findings += [finding.on(node.host) for finding in findings]
        if kind is not DeviceKind.CPU:
            host_findings.append(ray_finding(resource, node.count, max_devices).on(node.host))
    return [
        ok("cluster.hosts", f"{len(versions)} of {len(nodes)} hosts answered"),
        *merge(host_findings),
        *version_findings({node.host: of_node for node, of_node in versions.items()}),
        *_check_collectives(kind, resource, list(versions), environment),
    ]


def ray_finding(resource: str, count: int, max_count: int) -> Finding:
    """Warn if Ray offers fewer devices here (`count`) than on another host (`max_count`)."""
    return judge(
        count == max_count,
        "devices.ray",
        f"Ray offers {count} {resource}, other hosts up to {max_count}",
        f"`ray start ... --resources='{{\"{resource}\": {max_count}}}'` on this host",
    )


def version_findings(by_host: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Report each version that differs from most hosts as an error; else return one `ok`."""
    check = "cluster.versions"
    remedy = "install the same there, and start Ray there again"
    usual: dict[str, str] = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(by_host.values())):
        counts = Counter(versions.get(name, cluster_nodes.NONE) for versions in by_host.values())
        usual[name] = counts.most_common(1)[0][0]
    differing_hosts = defaultdict[str, list[str]](list)
    for host, versions in by_host.items():
        for name, version, usual_version in cluster_nodes.find_differences(versions, usual):
            differing_hosts[f"{name} {version}, on most hosts {usual_version}"].append(host)
    if not differing_hosts:
        return [ok(check, f"the same on {len(by_host)} hosts")]
    return [
        Finding(check, Status.ERROR, value, remedy, tuple(hosts))
        for value, hosts in differing_hosts.items()
    ]


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
    findings = []
    num_working = 0
    working_ranks: list[Node] = []
    for group, cause in zip(groups, causes, strict=True):
        if cause:
            findings.append(error("collectives.inside", cause, remedy).on(group[0].host))
        else:
            num_working += 1
            working_ranks += group
    value = f"{len(working_ranks)} ranks on {num_working} of {len(nodes)} hosts"
    if num_working > 0:
        findings.append(ok("collectives.inside", value))
    if num_working > 1:
        (cause,) = _all_reduce_groups(kind, resource, [working_ranks], environment)
        value += f" together: {cause}" if cause else " together"
        remedy = "look at network, firewall and GLOO/HCCL_SOCKET_IFNAME, at `ulimit -n` and ports"
        findings.append(judge(not cause, "collectives.all", value, remedy, Status.ERROR))
    return merge(findings)


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
    stores = []
    tasks = []
    for group in groups:
        store, port = worlds.open_store(ip)
        stores.append(store)
        for rank, node in enumerate(group):
            # A rank's deadline is earlier than the driver's, as its message has more detail.
            arguments = (kind, ip, port, rank, len(group), GROUP_S - 5.0)
            tasks.append(Task(node.id, all_reduce, arguments, resource if node.count else None))
    replies = iter(run_tasks(tasks, environment, GROUP_S))
    failures = []
    for group, store in zip(groups, stores, strict=True):
        causes = []
        absent = []
        for rank, node in enumerate(group):
            reply = next(replies)
            cause = reply.cause if isinstance(reply, Failed) else reply
            if cause:
                causes.append(cause)
            if not store.check([arrival_key(rank)]):
                absent.append(f"rank {rank} on {node.host}")
        texts = causes[:1]
        if absent:
            texts.insert(0, f"{', '.join(absent[:8])} never came")
        failures.append("; ".join(texts))
    return failures


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
        first_device = device.select_first_device(kind)
        dist.init_process_group(
            device.facts(kind).backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        expected = world_size * (world_size + 1) // 2  # 1 + 2 + ... + world_size
        elements = torch.empty(2**20, device=first_device)
        for _ in range(4):
            elements.fill_(rank + 1)
            dist.all_reduce(elements)
            if not bool((elements == expected).all()):
                raise ValueError(
                    f"the sum is wrong: {elements.min():g} to {elements.max():g}, not {expected}"
                )
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
