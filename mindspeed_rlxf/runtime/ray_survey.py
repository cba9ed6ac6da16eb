"""Plain functions on the nodes of a joined cluster, to examine it; nothing here trains.

Functions travel by name: they are those of the package that a node has installed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mindspeed_rlxf.runtime.errors import LateReply, WorkerError
from mindspeed_rlxf.runtime.ray_wait import Origin, as_worker_error


@dataclass(frozen=True)
class Node:
    """name: of the host, with a piece of the node's id where a host has several."""

    id: str
    name: str
    ip: str
    resources: Mapping[str, float]
    free: Mapping[str, float]


class Caller:
    """The actor class: calls what it is given."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(*args)


@dataclass
class Process:
    """One on a node. It may be dead or hang; `gather` tells."""

    node: Node
    actor: Any
    wants: Mapping[str, Any]

    def call(self, function: Callable[..., Any], *args: Any) -> tuple[Any, Origin]:
        return self.actor.call.remote(function, args), Origin(
            "doctor", 0, self.node.name, function.__name__
        )

    def end(self) -> None:
        ray.kill(self.actor)

    def again(self) -> Process:
        """A new one in its place."""
        self.end()
        return start(self.node, self.wants)


def nodes() -> list[Node]:
    """Those alive, by address: the order of ranks in a run."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    free = _free_resources()
    hosts = Counter(node["NodeManagerHostname"] for node in alive)
    found = []
    for node in alive:
        host, node_id = node["NodeManagerHostname"], node["NodeID"]
        name = host if hosts[host] == 1 else f"{host}/{node_id[:6]}"
        resources = node["Resources"]
        found.append(
            Node(node_id, name, node["NodeManagerAddress"], resources, free.get(node_id, resources))
        )
    return sorted(found, key=lambda node: (node.ip, node.name))


def start(node: Node, wants: Mapping[str, Any]) -> Process:
    """wants: further options of the actor, such as resources and environment."""
    strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
    options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": strategy, **wants}
    return Process(node, ray.remote(Caller).options(**options).remote(), wants)


def device_options(resource: str | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """Options of a process with one device; `resource` None = without."""
    options: dict[str, Any] = {}
    if resource == "GPU":
        options["num_gpus"] = 1
    elif resource is not None:
        options["resources"] = {resource: 1}
    if environment:
        options["runtime_env"] = {"env_vars": dict(environment)}
    return options


def gather(calls: Sequence[tuple[Any, Origin]], timeout_s: float) -> list[Any]:
    """A value for each call; WorkerError where it failed, LateReply where none came in time."""
    if not calls:
        return []
    refs = [ref for ref, _ in calls]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=max(timeout_s, 0.0))
    there = set(ready)
    return [
        _value(ref, origin) if ref in there else LateReply(f"no reply within {timeout_s:.0f} s")
        for ref, origin in calls
    ]


def _value(ref: Any, origin: Origin) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        return as_worker_error(error, origin)


def is_failure(value: Any) -> bool:
    return isinstance(value, (WorkerError, LateReply))


def cause(failure: Any) -> str:
    """In one line."""
    text = failure.cause if isinstance(failure, WorkerError) else str(failure)
    return " ".join(text.split())


def clock_offsets(processes: Sequence[Process], timeout_s: float) -> list[float | None]:
    """Seconds that each node's clock is ahead, within its round trip; None = no reply.

    All are asked at the same time. A reply counts when it comes: waiting for a host that is silent
    would hide what the others are off by.
    """
    end = time.monotonic() + timeout_s
    asked = {}
    for number, process in enumerate(processes):
        before = time.time()
        ref, origin = process.call(time.time)
        asked[ref] = number, before, origin
    found: list[float | None] = [None] * len(asked)
    waiting = list(asked)
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(end - time.monotonic(), 0.0))
        after = time.time()
        for ref in ready:
            number, before, origin = asked[ref]
            found[number] = _offset(before, _value(ref, origin), after)
        if not ready:
            break
    return found


def _offset(before: float, there: Any, after: float) -> float | None:
    if is_failure(there):
        return None
    late = max(before - there, there - after, 0.0)
    return late if there > after else -late


def _free_resources() -> Mapping[str, Mapping[str, float]]:
    """By node id. Ray has no public call for it."""
    from ray._private.state import available_resources_per_node

    return available_resources_per_node()
