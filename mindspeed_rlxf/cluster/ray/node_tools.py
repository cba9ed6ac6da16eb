"""The nodes of a Ray cluster: list them, run functions there, and reserve their devices."""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mindspeed_rlxf.cluster.errors import DevicesMissing, TooFewDevices
from mindspeed_rlxf.cluster.nodes import (
    MODEL_PREFIX,
    Node,
    NodeCheck,
    choose_model,
    describe_shortage,
    fits,
    sort_by_address,
    take_devices,
)
from mindspeed_rlxf.config.problems import Problem

logger = logging.getLogger(__name__)

OWN_WAIT_S = 30.0  # longest wait on our private cluster, which never grows
SAY_MISSING_EVERY_S = 15.0
PAUSE_S = (0.2, 2.0)  # between attempts; random, so that two runs do not collide again
PLACE_S = 0.5  # shortest wait for groups: Ray needs a moment to place one that fits
LOOK_EVERY_S = 0.1
NODE_ID = "ray.io/node-id"  # a label that Ray gives each node
A_LITTLE = 0.001  # of a node's model resource: chooses the model, leaves room for all pools

Shapes = Mapping[str, tuple[int, ...]]


def live_nodes(resource: str) -> list[Node]:
    """List the live nodes, also those without devices, sorted by address.

    Hosts of equal names get a part of their node id: `node1/3f2a91`. resource: of a device
    """
    free = ray._private.state.available_resources_per_node()
    alive = [facts for facts in ray.nodes() if facts["Alive"]]
    hosts = Counter(facts["NodeManagerHostname"] for facts in alive)
    found = []
    for facts in alive:
        host, totals = facts["NodeManagerHostname"], facts["Resources"]
        name = host if hosts[host] == 1 else f"{host}/{facts['NodeID'][:6]}"
        available = free.get(facts["NodeID"], totals).get(resource, 0)
        models = sorted(each for each in totals if each.startswith(MODEL_PREFIX))
        model = models[0].removeprefix(MODEL_PREFIX) if models else ""
        count, ip = int(totals.get(resource, 0)), facts["NodeManagerAddress"]
        found.append(Node(facts["NodeID"], name, ip, count, int(available), model))
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
    """Run all tasks at once, and kill late ones; return the result of each, or Failed, in order.

    A task takes no CPU, so that it also runs on a busy node, and one device if it names a resource.
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
    results: list[Any] = []
    for ref in refs:
        if ref in late:
            ray.cancel(ref, force=True)
            results.append(Failed(f"no reply within {timeout_s:.0f} s"))
            continue
        try:
            results.append(ray.get(ref))
        except RayError as error:
            results.append(Failed(str(error).strip().splitlines()[-1]))
    return results


def ask_nodes(
    nodes: Sequence[Node], function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
) -> list[Any]:
    """Call a function on each node; return the results, or Failed, in order."""
    return run_tasks([Task(node.id, function, args) for node in nodes], {}, timeout_s)


def node_address() -> str:
    """Return this node's address, by which other nodes reach it."""
    return str(ray.util.get_node_ip_address())


def device_options(resource: str | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's options of a process without CPUs, with one device of `resource` or none.

    The environment must have no secrets: Ray shows and logs it.
    """
    options: dict[str, Any] = {"num_cpus": 0}
    if resource == "GPU":
        options["num_gpus"] = 1
    elif resource is not None:
        options["resources"] = {resource: 1}
    if environment:
        options["runtime_env"] = {"env_vars": dict(environment)}
    return options


class DeviceClaim:
    """Reserves placement groups for the pools of one run: all of them or none.

    A run that waits holds no devices, so that two runs with half of their devices each do not wait
    for each other.
    """

    def __init__(
        self, address: str, resource: str, logical: bool, wait_s: float | None, check: NodeCheck
    ) -> None:
        """Store what `reserve` needs; nothing is reserved yet.

        Args:
            resource: Ray's name of a device.
            logical: True on our own CPU cluster, where one host stands for all nodes.
            wait_s: Longest wait for devices; None on our private cluster, which never grows.
            check: Compares the nodes of a joined cluster with the driver's.
        """
        self._address, self._resource = address, resource
        self._logical, self._wait_s, self._check = logical, wait_s, check

    def reserve(self, shapes: Shapes) -> dict[str, Any]:
        """Reserve devices for all pools, wait for missing ones; return the placement group by pool.

        A group has a bundle for each entry of the pool's shape. Warns while it waits. The deadline
        does not cut short the comparison of new nodes (`NodeCheck.check`), which has its own.

        Raises:
            DevicesMissing: At the deadline, on a joined cluster.
            TooFewDevices: At the deadline, on our own.
            UserError: A node differs from the driver's, or a pool would mix device models.
        """
        limit = OWN_WAIT_S if self._wait_s is None else self._wait_s
        deadline = time.monotonic() + limit
        while True:
            left = max(deadline - time.monotonic(), 0)
            # Not afterwards: Ray lists the devices of removed groups as used for some time.
            nodes = live_nodes(self._resource)
            groups, late = self._try_to_reserve(shapes, min(left, SAY_MISSING_EVERY_S))
            if not late:
                return groups
            time.sleep(min(random.uniform(*PAUSE_S), left))
            self._report_shortage(shapes, late, nodes, is_last=time.monotonic() >= deadline)

    def _try_to_reserve(self, shapes: Shapes, wait_s: float) -> tuple[dict[str, Any], list[str]]:
        """Ask Ray for a placement group per pool, and wait; return (groups, late pools).

        Late are pools that were not placed, or are on a node that was excluded meanwhile. If there
        is one, all groups have been removed again.
        """
        nodes = self._list_nodes()
        groups: dict[str, Any] = {}
        try:
            # The largest first: small pools fit into what is left, not the other way round.
            for name in sorted(shapes, key=lambda name: -max(shapes[name])):
                model = choose_model(name, shapes[name], nodes)
                nodes = take_devices(nodes, shapes[name], model)
                groups[name] = self._request_group(shapes[name], model)
            late = _find_late_pools(groups, wait_s)
            if not late:  # a node may have joined meanwhile
                self._list_nodes()
                late = _find_pools_on(groups, self._check.excluded)
        except BaseException:
            _remove(groups)
            raise
        if late:
            _remove(groups)
        return groups, [name for name in shapes if name in late]

    def _list_nodes(self) -> list[Node]:
        if self._wait_s is None:
            return []  # our private cluster is one host
        return self._check.check([node for node in live_nodes(self._resource) if node.count])

    def _request_group(self, shape: tuple[int, ...], model: str | None) -> Any:
        bundle = {f"{MODEL_PREFIX}{model}": A_LITTLE} if model else {}
        strategy = "PACK" if self._logical or len(shape) == 1 else "STRICT_SPREAD"
        bundles = [{self._resource: count, **bundle} for count in shape]
        excluded, labels = sorted(self._check.excluded), None
        if excluded:
            labels = [{NODE_ID: f"!in({','.join(excluded)})"}] * len(bundles)
        return placement_group(bundles, strategy=strategy, bundle_label_selector=labels)

    def _report_shortage(
        self, shapes: Shapes, late: list[str], nodes: Sequence[Node], is_last: bool
    ) -> None:
        """Warn of late pools, with the nodes that may be used; raise the text if `is_last`."""
        usable = [n for n in nodes if n.count and n.id not in self._check.excluded]
        free = [node.free for node in usable]
        # Each fits alone: together they do not, or another run has taken what was free.
        unplaced = [name for name in late if not fits(shapes[name], free)] or late
        found = [
            describe_shortage(name, shapes[name], self._resource, self._address, usable)
            for name in unplaced
        ]
        if not is_last:
            logger.warning("waiting for devices: %s", "; ".join(found))
            return
        if self._wait_s is None:
            raise TooFewDevices([Problem("", text) for text in found], free)
        waited = f"waited {self._wait_s:g} s (resource_pool.wait_s) for devices: "
        raise DevicesMissing(waited + "; ".join(found), free)


def _find_late_pools(groups: Mapping[str, Any], wait_s: float) -> list[str]:
    """Wait until Ray has placed all groups, `wait_s` at most; return the names of the others.

    `PlacementGroup.wait` truncates its limit to whole seconds, and calls a placed group late if no
    time is left (Ray 2.60).
    """
    deadline = time.monotonic() + max(wait_s, PLACE_S)
    while True:
        table = ray.util.placement_group_table
        late = [name for name, group in groups.items() if table(group).get("state") != "CREATED"]
        if not late or time.monotonic() >= deadline:
            return late
        time.sleep(LOOK_EVERY_S)


def _find_pools_on(groups: Mapping[str, Any], nodes: set[str]) -> list[str]:
    tables = {name: ray.util.placement_group_table(group) for name, group in groups.items()}
    return [n for n, found in tables.items() if nodes & {*found["bundles_to_node_id"].values()}]


def _remove(groups: Mapping[str, Any]) -> None:
    for group in groups.values():
        ray.util.remove_placement_group(group)
