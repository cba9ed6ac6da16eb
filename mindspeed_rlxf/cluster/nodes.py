"""The nodes of a cluster: how many devices each has, of which model, and what is missing."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_rlxf.config.errors import Problem, UserError

MAX_SHOWN = 16  # nodes in one message
MODEL_PREFIX = "accelerator_type:"  # Ray's own resource for the model of a node's devices


@dataclass(frozen=True)
class Node:
    """A node that has devices. model: as Ray found it, empty where it did not."""

    id: str
    host: str
    ip: str
    count: int
    free: int
    model: str = ""

    def __str__(self) -> str:
        model = f" {self.model}" if self.model else ""
        return f"{self.host} ({self.ip}): {self.free} of {self.count}{model} free"


def make_node(
    facts: Mapping[str, object], resource: str, totals: Mapping[str, float], free: float
) -> Node:
    """facts: NodeID, NodeManagerHostname and NodeManagerAddress of `ray.nodes()`."""
    models = sorted(name for name in totals if name.startswith(MODEL_PREFIX))
    return Node(
        id=str(facts["NodeID"]),
        host=str(facts["NodeManagerHostname"]),
        ip=str(facts["NodeManagerAddress"]),
        count=int(totals.get(resource, 0)),
        free=int(free),
        model=models[0].removeprefix(MODEL_PREFIX) if models else "",
    )


def by_address(nodes: Sequence[Node]) -> list[Node]:
    """The order in which people and ranks count nodes."""
    return sorted(nodes, key=lambda node: (address_key(node.ip), node.host, node.id))


def address_key(ip: str) -> tuple[int, int]:
    """Orders addresses as numbers: 10.0.0.9 before 10.0.0.10."""
    address = ipaddress.ip_address(ip)
    return address.version, int(address)


def fits(shape: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether nodes with so many devices can each take one entry of the shape."""
    largest = sorted(counts, reverse=True)[: len(shape)]
    wanted = sorted(shape, reverse=True)
    return len(largest) == len(wanted) and all(a <= b for a, b in zip(wanted, largest, strict=True))


def lacking(
    late: Sequence[str], shapes: Mapping[str, Sequence[int]], nodes: Sequence[Node]
) -> list[str]:
    """Which of the pools that did not get their devices are to be told: those for which there are
    too few, or all where any of them alone could have them."""
    free = [node.free for node in nodes]
    return [name for name in late if not fits(shapes[name], free)] or list(late)


def model_for(pool: str, shape: Sequence[int], nodes: Sequence[Node]) -> str | None:
    """The device model that the pool has to ask for; None where there is nothing to choose.

    A pool computes in step: a mixture would run at the speed of the slower devices, with other
    rounding on each. Raises UserError where nodes of one model are too few and all together not.
    """
    models = list(dict.fromkeys(node.model for node in by_address(nodes) if node.model))
    if len(models) < 2:
        return None
    for number in ("free", "count"):  # what can be had now comes first
        for model in models:
            if fits(shape, [getattr(node, number) for node in nodes if node.model == model]):
                return model
    if not fits(shape, [node.count for node in nodes]):
        return None  # nodes that are not there yet may be of one model
    raise UserError(
        Problem(
            f"resource_pool.{pool}",
            f"must be on devices of one model; the cluster has {listed(nodes)}",
            list(shape),
            "make the pool smaller, or add nodes of the same model",
        )
    )


def taken(nodes: Sequence[Node], shape: Sequence[int], model: str | None) -> list[Node]:
    """The nodes when a pool has its devices, each entry on the node that it fills best."""
    left = {node.id: node for node in nodes}
    possible = [node for node in nodes if model in (None, node.model)]
    for count in sorted(shape, reverse=True):
        large = [node for node in possible if node.free >= count]
        if large:
            chosen = min(large, key=lambda node: node.free)
            possible.remove(chosen)
            left[chosen.id] = replace(chosen, free=chosen.free - count)
    return list(left.values())


def missing(pool: str, shape: Sequence[int], resource: str, address: str, n: Sequence[Node]) -> str:
    """What a pool waits for, with every node by name."""
    each = f"{list(shape)}, one entry per node" if len(shape) > 1 else f"{shape[0]} on one node"
    return (
        f"resource_pool.{pool} needs {resource}: {each}; the cluster at {address} has "
        f"{listed(n)}; ask for less, free some, or start Ray on more nodes with "
        f"--resources='{{\"{resource}\": COUNT}}' (device.devices_per_node is what a count fills)"
    )


def listed(nodes: Sequence[Node]) -> str:
    shown = [str(node) for node in by_address(nodes)[:MAX_SHOWN]]
    if len(nodes) > MAX_SHOWN:
        shown.append(f"and {len(nodes) - MAX_SHOWN} more nodes")
    return ", ".join(shown) or "no node that has any"
