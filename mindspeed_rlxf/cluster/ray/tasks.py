"""Run functions on chosen nodes of the Ray cluster, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


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
        options: dict[str, Any] = {"runtime_env": {"env_vars": dict(environment)}}
        if task.resource == "GPU":
            options["num_gpus"] = 1
        elif task.resource is not None:
            options["resources"] = {task.resource: 1}
        where = NodeAffinitySchedulingStrategy(task.node, soft=False)
        # max_calls: a process that ran a task is not used for another one
        options |= {"num_cpus": 0, "max_retries": 0, "max_calls": 1, "scheduling_strategy": where}
        refs.append(ray.remote(**options)(task.function).remote(*task.args))
    _, late = ray.wait(refs, num_returns=len(refs), timeout=max(timeout_s, 0), fetch_local=False)
    for ref in late:
        ray.cancel(ref, force=True)
    return [
        Failed(f"no reply within {timeout_s:.0f} s") if ref in late else _result(ref)
        for ref in refs
    ]


def _result(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        return Failed(str(error).strip().splitlines()[-1])


def node_address() -> str:
    """Return this node's address, by which other nodes reach it."""
    return str(ray.util.get_node_ip_address())
