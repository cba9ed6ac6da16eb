"""The nodes of a cluster: their devices, the order of ranks on them, and missing devices."""

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from mindspeed_rlxf.config.problems import Problem, UserError

MAX_SHOWN = 16  # nodes in one message
MODEL_PREFIX = "accelerator_type:"  # Ray's own resource for the model of a node's devices

A = TypeVar("A")


@dataclass(frozen=True)
class Node:
    """A node with `count` devices, `free` of them not in use. model: empty = Ray found none"""

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
    """Return a Node from Ray's description.

    facts:    NodeID, NodeManagerHostname and NodeManagerAddress of `ray.nodes()`
    resource: Ray's name of a device
    totals:   the node's resources by name; a name with MODEL_PREFIX gives the device model, which
              is "" without one
    free:     devices that are not in use; rounded down
    """
    models = sorted(name for name in totals if name.startswith(MODEL_PREFIX))
    return Node(
        id=str(facts["NodeID"]),
        host=str(facts["NodeManagerHostname"]),
        ip=str(facts["NodeManagerAddress"]),
        count=int(totals.get(resource, 0)),
        free=int(free),
        model=models[0].removeprefix(MODEL_PREFIX) if models else "",
    )


def sort_by_address(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes sorted by their addresses as numbers, then by host and id."""
    return sorted(nodes, key=lambda node: (address_key(node.ip), node.host, node.id))


def address_key(ip: str) -> tuple[int, int]:
    """Return (IP version, address as a number), to sort 10.0.0.9 before 10.0.0.10."""
    address = ipaddress.ip_address(ip)
    return address.version, int(address)


def fits(shape: Sequence[int], counts: Sequence[int]) -> bool:
    """Return whether each entry of the shape fits on a node of its own.

    shape:  devices that the pool takes from each of its nodes
    counts: devices of each node of the cluster
    """
    largest = sorted(counts, reverse=True)[: len(shape)]
    wanted = sorted(shape, reverse=True)
    return len(largest) == len(wanted) and all(a <= b for a, b in zip(wanted, largest, strict=True))


def find_unplaced_pools(
    late: Sequence[str], shapes: Mapping[str, Sequence[int]], nodes: Sequence[Node]
) -> list[str]:
    """Return which of the late pools are too large for the free devices.

    Where each would fit by itself, all late pools are returned.
    late:   pools that Ray has not placed
    shapes: pool -> processes on each node
    """
    free = [node.free for node in nodes]
    return [name for name in late if not fits(shapes[name], free)] or list(late)


def choose_model(pool: str, shape: Sequence[int], nodes: Sequence[Node]) -> str | None:
    """Return the device model for a pool.

    It is the first, by address of its nodes, with enough free devices; else the first with enough
    devices, also busy ones. None where the nodes have fewer than two known models, or where all
    nodes together are too small. Raises UserError where only a mixture is large enough: it would
    run at the speed of the slower devices, with different rounding on each.
    """
    models = list(dict.fromkeys(node.model for node in sort_by_address(nodes) if node.model))
    if len(models) < 2:
        return None
    for number in ("free", "count"):  # free devices come first
        for model in models:
            if fits(shape, [getattr(node, number) for node in nodes if node.model == model]):
                return model
    if not fits(shape, [node.count for node in nodes]):
        return None  # nodes that join later may be of one model
    raise UserError(
        Problem(
            f"resource_pool.{pool}",
            f"must be on devices of one model; the cluster has {list_nodes(nodes)}",
            list(shape),
            "make the pool smaller, or add nodes of the same model",
        )
    )


def take_devices(nodes: Sequence[Node], shape: Sequence[int], model: str | None) -> list[Node]:
    """Return all nodes, with fewer free devices as if the pool ran on them.

    Each entry of the shape, the largest first, takes a node of its own: the one with the fewest
    free devices that suffice. An entry that fits nowhere takes none.
    model: take devices of nodes of this model only; None = any
    """
    left = {node.id: node for node in nodes}
    possible = [node for node in nodes if model in (None, node.model)]
    for count in sorted(shape, reverse=True):
        large = [node for node in possible if node.free >= count]
        if large:
            chosen = min(large, key=lambda node: node.free)
            possible.remove(chosen)
            left[chosen.id] = replace(chosen, free=chosen.free - count)
    return list(left.values())


def describe_shortage(
    pool: str, shape: Sequence[int], resource: str, address: str, nodes: Sequence[Node]
) -> str:
    """Return a message with the devices that a pool needs, the nodes there are, and a remedy."""
    each = f"{list(shape)}, one entry per node" if len(shape) > 1 else f"{shape[0]} on one node"
    return (
        f"resource_pool.{pool} needs {resource}: {each}; the cluster at {address} has "
        f"{list_nodes(nodes)}; ask for less, free some, or start Ray on more nodes with "
        f"--resources='{{\"{resource}\": COUNT}}' (device.devices_per_node is what a count fills)"
    )


def list_nodes(nodes: Sequence[Node]) -> str:
    """Return the nodes as text, joined by ", " in the order of addresses.

    Only the first MAX_SHOWN are named; "and N more nodes" counts the others. Without nodes the text
    is "no node that has any".
    """
    shown = [str(node) for node in sort_by_address(nodes)[:MAX_SHOWN]]
    if len(nodes) > MAX_SHOWN:
        shown.append(f"and {len(nodes) - MAX_SHOWN} more nodes")
    return ", ".join(shown) or "no node that has any"


@dataclass(frozen=True)
class Place:
    """The host and the devices of a worker process."""

    host: str
    ip: str
    entry: int  # index in `processes_per_node`
    devices: tuple[int, ...]  # ids that Ray gave it; empty for logical devices
    pid: int = 0
    node: str = ""  # Ray's id of the node
    oom_kills: int = 0  # processes of the host killed for lack of memory before this one started


def order_ranks(found: Sequence[tuple[A, Place]]) -> tuple[tuple[A, ...], tuple[Place, ...]]:
    """Sort processes into the order of ranks, by node, then device; return (processes, places).

    Nodes come in the order of `processes_per_node`, by `Place.entry`; but Ray may swap nodes with
    equally many processes: these take their entries in the order of addresses, so that a restart
    gives the same ranks.
    """
    sizes = Counter(place.entry for _, place in found)
    address = {place.entry: address_key(place.ip) for _, place in found}
    position: dict[int, int] = {}
    for size in set(sizes.values()):
        slots = sorted(entry for entry in sizes if sizes[entry] == size)
        position |= dict(zip(sorted(slots, key=lambda e: (address[e], e)), slots, strict=True))
    ordered = sorted(found, key=lambda pair: (position[pair[1].entry], pair[1].devices))
    return tuple(process for process, _ in ordered), tuple(place for _, place in ordered)


def describe_places(places: Sequence[Place]) -> str:
    """Return places, in the order of ranks, as `ranks 0-7 on node1 (10.0.0.1), rank 8 on ...`.

    Neighbouring ranks on one host are joined; empty text for no places.
    """
    parts, first = [], 0
    for (host, ip), group in groupby(places, key=lambda place: (place.host, place.ip)):
        last = first + len(list(group)) - 1
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        parts.append(f"{ranks} on {host} ({ip})")
        first = last + 1
    return ", ".join(parts)
