"""List the nodes of the Ray cluster, and run functions there, each in a process of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mindspeed_rlxf.cluster.nodes import Node, make_node, sort_by_address


def live_nodes(resource: str) -> list[Node]:
    """List the nodes that are alive, also those without devices, sorted by address.

    Hosts of equal names get a part of their node id: `node1/3f2a91`.
    resource: Ray's name of a device
    """
    free = ray._private.state.available_resources_per_node()
    alive = [facts for facts in ray.nodes() if facts["Alive"]]
    hosts = Counter(facts["NodeManagerHostname"] for facts in alive)
    found = []
    for facts in alive:
        host, totals = facts["NodeManagerHostname"], facts["Resources"]
        name = host if hosts[host] == 1 else f"{host}/{facts['NodeID'][:6]}"
        available = free.get(facts["NodeID"], totals).get(resource, 0)
        named = {**facts, "NodeManagerHostname": name}
        found.append(make_node(named, resource, totals, available))
    return sort_by_address(found)


class Task(NamedTuple):
    """A function, sent by name, to call on a node. node: Ray's id; resource: of a device or None"""

    node: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    resource: str | None = None


class Failed(NamedTuple):
    """In place of the result of a task that raised, died or was late."""

    cause: str


def run_tasks(tasks: Sequence[Task], environment: Mapping[str, str], timeout_s: float) -> list[Any]:
    """Run all tasks at once; return the result of each, or Failed, in order. Kill late tasks.

    A task takes no CPU, so that it also runs on a busy node, and one device if it names a resource.
    environment: variables of their processes
    """
    refs = []
    for task in tasks:
        where = NodeAffinitySchedulingStrategy(task.node, soft=False)
        # max_calls: a process that ran a task is not used for another one
        remote = ray.remote(
            max_retries=0,
            max_calls=1,
            scheduling_strategy=where,
            **device_options(task.resource, environment),
        )
        refs.append(remote(task.function).remote(*task.args))
    _, late = ray.wait(refs, num_returns=len(refs), timeout=max(timeout_s, 0), fetch_local=False)
    for ref in late:
        ray.cancel(ref, force=True)
    return [
        Failed(f"no reply within {timeout_s:.0f} s") if ref in late else _result(ref)
        for ref in refs
    ]


def ask_nodes(
    nodes: Sequence[Node], function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
) -> list[Any]:
    """Call a function on each node; return the results, or Failed, in order."""
    return run_tasks([Task(node.id, function, args) for node in nodes], {}, timeout_s)


def _result(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        return Failed(str(error).strip().splitlines()[-1])


def node_address() -> str:
    """Return this node's address, by which other nodes reach it."""
    return str(ray.util.get_node_ip_address())


def device_options(resource: str | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's options of a process without CPUs, with one device of `resource` or none.

    environment: variables of its process, without secrets: Ray shows and logs them
    """
    options: dict[str, Any] = {"num_cpus": 0}
    if resource == "GPU":
        options["num_gpus"] = 1
    elif resource is not None:
        options["resources"] = {resource: 1}
    if environment:
        options["runtime_env"] = {"env_vars": dict(environment)}
    return options
