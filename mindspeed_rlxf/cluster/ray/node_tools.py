"""Ray nodes: list them, run functions there, compare them with the driver and reserve devices."""

import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mindspeed_rlxf.cluster.errors import DevicesMissing
from mindspeed_rlxf.cluster.nodes import (
    Node,
    NodeReport,
    address_key,
    build_id,
    describe_shortage,
    find_node_problems,
    report_node,
    unshared,
)
from mindspeed_rlxf.config.problems import Problem, UserError

logger = logging.getLogger(__name__)

OWN_WAIT_S = 30.0  # longest wait on our private cluster, which never grows
SAY_MISSING_EVERY_S = 15.0
PAUSE_S = (0.2, 2.0)  # between attempts; random, so that two runs do not collide again
PLACE_S = 0.5  # shortest wait for groups: Ray needs a moment to place one that fits
LOOK_EVERY_S = 0.1
NODE_ID = "ray.io/node-id"  # a label that Ray gives each node

Shapes = Mapping[str, tuple[int, ...]]


def live_nodes(resource: str) -> list[Node]:
    """List live nodes sorted by address, including those without devices.

    Hosts with equal names get a node id suffix: `node1/3f2a91`.
    """
    free = ray._private.state.available_resources_per_node()
    alive = [facts for facts in ray.nodes() if facts["Alive"]]
    num_nodes_of_host = Counter(facts["NodeManagerHostname"] for facts in alive)
    nodes = []
    for facts in alive:
        node_id = facts["NodeID"]
        host = facts["NodeManagerHostname"]
        if num_nodes_of_host[host] > 1:
            host = f"{host}/{node_id[:6]}"
        totals = facts["Resources"]
        num_devices = int(totals.get(resource, 0))
        num_free = int(free.get(node_id, totals).get(resource, 0))
        nodes.append(Node(node_id, host, facts["NodeManagerAddress"], num_devices, num_free))
    return sorted(nodes, key=lambda node: (address_key(node.ip), node.host))


def driver_address() -> str:
    """Return the address of the driver's node, as the cluster knows it."""
    return str(ray.util.get_node_ip_address())


class Task(NamedTuple):
    """A function, sent by name, to call on a node."""

    node: str  # Ray's id
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    resource: str | None = None  # needs one such device


class Failed(NamedTuple):
    """Replaces the result if a task raised, died or was late."""

    cause: str


def run_tasks(tasks: Sequence[Task], environment: Mapping[str, str], timeout_s: float) -> list[Any]:
    """Run all tasks at once, and kill late ones; return each result, or Failed, in order.

    A task takes no CPU, so it also runs on a busy node, and one device if it names a resource.
    """
    refs = []
    for task in tasks:
        # max_calls: a process that ran a task is not used for another one
        remote = ray.remote(
            max_retries=0,
            max_calls=1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(task.node, soft=False),
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


def device_options(resource: str | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray options for a process without CPUs, with one `resource` device or none.

    The environment must not contain secrets: Ray shows and logs it.
    """
    options: dict[str, Any] = {"num_cpus": 0}
    if resource == "GPU":
        options["num_gpus"] = 1
    elif resource == "CPU":
        options["num_cpus"] = 1
    elif resource is not None:
        options["resources"] = {resource: 1}
    if environment:
        options["runtime_env"] = {"env_vars": dict(environment)}
    return options


class DeviceClaim:
    """Reserves placement groups for all pools in a run, or for none.

    A waiting run holds no devices, so two runs with half their devices each do not wait for each
    other. On a joined cluster each node is compared once with the driver node.
    """

    def __init__(
        self,
        address: str,
        resource: str,
        logical: bool,
        wait_s: float | None,
        keys: Mapping[str, str],
        run_file: Path | None,
        check_s: float,
        excludes: bool,
    ) -> None:
        """Prepare a claim; nothing is compared or reserved yet.

        Args:
            address: Cluster address, for messages.
            resource: Ray's device resource.
            logical: True on a private CPU cluster, whose one host stands for all nodes.
            wait_s: Longest wait for devices; None on a private cluster, which never grows.
            keys: Folders read by workers, with the configuration keys that name each.
            run_file: A file in the run directory, which all nodes should see.
            check_s: Longest wait for reports from new nodes.
            excludes: True excludes differing nodes; False refuses them.
        """
        self._address = address
        self._resource = resource
        self._logical = logical
        self._wait_s = wait_s
        self._keys = dict(keys)
        self._check_s = check_s
        self._excludes = excludes
        self._run_file = None if run_file is None else str(run_file)
        self.excluded: set[str] = set()  # ids of nodes
        self._driver: NodeReport | None = None
        self._seen: dict[str, NodeReport] = {}

    def reserve(self, shapes: Shapes) -> dict[str, Any]:
        """Reserve devices for all pools, wait for missing ones; return the placement group by pool.

        A group has one bundle per entry in the pool's shape. Warns while waiting. The deadline does
        not cut short the comparison with new nodes, which has its own.

        Raises:
            DevicesMissing: At the deadline, on a joined cluster.
            UserError: At the deadline, on a private cluster; or a node differs from the driver.
        """
        limit = OWN_WAIT_S if self._wait_s is None else self._wait_s
        deadline = time.monotonic() + limit
        while True:
            left_s = max(deadline - time.monotonic(), 0)
            # Not afterwards: Ray lists the devices of removed groups as used for some time.
            nodes = [node for node in live_nodes(self._resource) if node.count]
            if self._wait_s is not None:
                nodes = self.check(nodes)
            groups, late = self._try_to_reserve(shapes, nodes, min(left_s, SAY_MISSING_EVERY_S))
            if not late:
                return groups
            time.sleep(min(random.uniform(*PAUSE_S), left_s))
            text = "; ".join(
                describe_shortage(name, shapes[name], self._resource, self._address, nodes)
                for name in late
            )
            if time.monotonic() < deadline:
                logger.warning("waiting for devices: %s", text)
            elif self._wait_s is None:
                raise UserError([Problem("", text)])
            else:
                waited = f"waited {limit:g} s (resource_pool.wait_s) for devices: "
                raise DevicesMissing(waited + text)

    def check(self, nodes: list[Node]) -> list[Node]:
        """Compare new nodes with the driver; return `nodes` without excluded ones.

        Waits up to `check_s` for their reports. Warns once per excluded node.

        Raises:
            UserError: A node has a fault, and faulty nodes are refused.
        """
        new = [n for n in nodes if n.id not in self._seen and n.id not in self.excluded]
        if not new:
            return [node for node in nodes if node.id not in self.excluded]
        arguments = list(self._keys), self._run_file
        if self._driver is None:
            self._driver = report_node(*arguments)
        tasks = [Task(node.id, report_node, arguments) for node in new]
        replies = run_tasks(tasks, {}, self._check_s)
        faults: dict[Node, list[str]] = {}
        for node, reply in zip(new, replies, strict=True):
            if isinstance(reply, NodeReport):
                self._seen[node.id] = reply
                faults[node] = find_node_problems(self._driver, reply, self._keys)
            else:  # an import that fails there, or the node went away
                faults[node] = [
                    f"mindspeed_rlxf on {node.host} ({node.ip}) must be that of the driver "
                    f"({build_id()}): {reply.cause}; install the same there, and start Ray on "
                    "that host from that environment again"
                ]
        texts = dict.fromkeys(itertools.chain.from_iterable(faults.values()))
        if texts and not self._excludes:
            raise UserError([Problem("", text) for text in texts])
        for node, node_faults in faults.items():
            if node_faults:
                self.excluded.add(node.id)
                listed = "; ".join(node_faults)
                logger.warning("%s (%s) is excluded: %s", node.host, node.ip, listed)
        return [node for node in nodes if node.id not in self.excluded]

    def require_shared_folder(self, hosts: set[str]) -> None:
        """Raise UserError if a host in the run does not see the run directory."""
        blind_hosts = {r.host for r in self._seen.values() if not r.sees_run} & hosts
        if blind_hosts:
            raise UserError(unshared(", ".join(sorted(blind_hosts))))

    def _try_to_reserve(
        self, shapes: Shapes, nodes: Sequence[Node], wait_s: float
    ) -> tuple[dict[str, Any], list[str]]:
        """Ask Ray for a placement group per pool on the nodes, and wait; return (groups, late).

        If a pool was not placed, all groups have been removed again.
        """
        ids = ",".join(node.id for node in nodes) or "none"  # not nodes that join meanwhile
        groups: dict[str, Any] = {}
        late: list[str] = list(shapes)
        try:
            # The largest first: small pools fit into what is left, not the other way round.
            for name in sorted(shapes, key=lambda name: -max(shapes[name])):
                shape = shapes[name]
                packs = self._logical or len(shape) == 1
                groups[name] = placement_group(
                    [{self._resource: count} for count in shape],
                    strategy="PACK" if packs else "STRICT_SPREAD",
                    bundle_label_selector=[{NODE_ID: f"in({ids})"}] * len(shape),
                )
            late = _find_late_pools(groups, wait_s)
        finally:
            for group in groups.values() if late else ():
                ray.util.remove_placement_group(group)
        return groups, [name for name in shapes if name in late]


def _find_late_pools(groups: Mapping[str, Any], wait_s: float) -> list[str]:
    """Wait until Ray has placed all groups, up to `wait_s`; return the other pools' names.

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
