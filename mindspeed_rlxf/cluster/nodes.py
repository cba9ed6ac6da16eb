"""The nodes of a cluster: devices, order of ranks, and comparison with the driver's node.

Light to import and free of Ray: `report_node` runs on every node.
"""

import functools
import hashlib
import ipaddress
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import mindspeed_rlxf
from mindspeed_rlxf.config import packages
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.weights.formats import find_weights
from mindspeed_rlxf.weights.megatron_layout import RANK_FILE

logger = logging.getLogger(__name__)

MAX_SHOWN = 16  # nodes in one message
MODEL_PREFIX = "accelerator_type:"  # Ray's own resource for the model of a node's devices
OURS = "mindspeed_rlxf"
NONE = "none"  # the version of what is not installed
PACKAGES = ("torch", "transformers", packages.MEGATRON)
DEVICE_PACKAGES = ("torch-npu", "mindspeed")  # a driver on a node without devices may lack them
HASHED = (".json", ".jinja", ".txt", ".model")  # small: contents count; of others the size
SIZED = (".safetensors", ".distcp", ".metadata", "common.pt", RANK_FILE)  # compared by size
WEIGHTS = "weights"  # the entry with the format and folder of the weights
MAX_HASHED = 64 * 2**20
HEALTHY = ("OK", "")  # words of the tools of device drivers
MAX_PROBLEMS = 3  # of one folder on one node
SEEN_WITHIN_S = 10.0  # network file systems show new files late

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


def sort_by_address(nodes: Sequence[Node]) -> list[Node]:
    """Sort nodes by address, then host and id."""
    return sorted(nodes, key=lambda node: (address_key(node.ip), node.host, node.id))


def address_key(ip: str) -> tuple[int, int]:
    """Return (IP version, address as a number), to sort 10.0.0.9 before 10.0.0.10."""
    address = ipaddress.ip_address(ip)
    return address.version, int(address)


def fits(shape: Sequence[int], counts: Sequence[int]) -> bool:
    """Return whether each entry of a pool's shape fits on a node of its own.

    Args:
        shape: Devices of the pool on each of its nodes.
        counts: Devices of each node of the cluster.
    """
    largest = sorted(counts, reverse=True)[: len(shape)]
    wanted = sorted(shape, reverse=True)
    return len(largest) == len(wanted) and all(a <= b for a, b in zip(wanted, largest, strict=True))


def choose_model(pool: str, shape: Sequence[int], nodes: Sequence[Node]) -> str | None:
    """Return the device model for a pool: the first by address with enough free devices.

    Without one, the first with enough devices, busy ones included. None if the nodes have fewer
    than two known models, or are too small together.

    Raises:
        UserError: Only a mixture of models is large enough. It would run at the speed of the
            slower devices, with different rounding on each.
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
    """Return all nodes with the free devices that are left if the pool runs on them.

    Each entry of the shape, the largest first, takes the node with the fewest free devices that
    suffice. An entry that fits nowhere takes none.

    Args:
        model: Device model to take; None = any.
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
    """Return a message with the devices that a pool needs, the nodes, and a hint."""
    each = f"{list(shape)}, one entry per node" if len(shape) > 1 else f"{shape[0]} on one node"
    return (
        f"resource_pool.{pool} needs {resource}: {each}; the cluster at {address} has "
        f"{list_nodes(nodes)}; ask for less, free some, or start Ray on more nodes with "
        f"--resources='{{\"{resource}\": COUNT}}' (device.devices_per_node is what a count fills)"
    )


def list_nodes(nodes: Sequence[Node]) -> str:
    """Return the first MAX_SHOWN nodes as text, in the order of addresses."""
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


def order_ranks(found: Sequence[tuple[A, Place]]) -> tuple[tuple[A, ...], tuple[Place, ...]]:
    """Sort processes into the order of ranks: by node, then device; return (processes, places).

    Nodes come in the order of `processes_per_node` (`Place.entry`). Ray may swap nodes with equally
    many processes: these are sorted by address, so that a restart gives the same ranks.
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
    """Return places, in the order of ranks, as `ranks 0-7 on node1 (10.0.0.1), rank 8 on ...`."""
    parts, first = [], 0
    for (host, ip), group in groupby(places, key=lambda place: (place.host, place.ip)):
        last = first + len(list(group)) - 1
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        parts.append(f"{ranks} on {host} ({ip})")
        first = last + 1
    return ", ".join(parts)


@functools.cache
def build_id() -> str:
    """Return this package's version with a hash of its sources: `0.1.0, sources 3f2a91c07d4e`."""
    sources = hash_sources(Path(mindspeed_rlxf.__file__).parent)
    return f"{mindspeed_rlxf.__version__}, sources {sources}"


def hash_sources(folder: Path) -> str:
    """Hash the names and contents of the Python files below a folder; 12 hexadecimal digits."""
    hashed = hashlib.sha256()
    for file in sorted(folder.rglob("*.py"), key=lambda file: file.relative_to(folder).as_posix()):
        hashed.update(file.relative_to(folder).as_posix().encode() + b"\0")
        hashed.update(hashlib.sha256(file.read_bytes()).digest())
    return hashed.hexdigest()[:12]


def versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of this package (`build_id`) and of `names`; NONE if not installed."""
    return {OURS: build_id(), **{name: packages.version(name) or NONE for name in names}}


def find_differences(
    installed: Mapping[str, str], expected: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    """Return (package, version, expected version) of each package with another version.

    What follows a `+` does not count: 2.7.1+cpu, as on a head node without devices, equals 2.7.1.
    """
    found = [(name, installed.get(name, NONE), wanted) for name, wanted in expected.items()]
    return [each for each in found if _public(each[1]) != _public(each[2])]


def usual_versions(all_installed: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the version that most hosts have, by package; the first of equally frequent ones.

    Args:
        all_installed: Versions by package, of each host.
    """
    found = {}
    for name in dict.fromkeys(name for installed in all_installed for name in installed):
        values = [installed.get(name, NONE) for installed in all_installed]
        (most, _), *_ = Counter(map(_public, values)).most_common(1)
        found[name] = next(version for version in values if _public(version) == most)
    return found


def _public(version: str) -> str:
    return version.partition("+")[0]


@dataclass(frozen=True)
class NodeReport:
    """Installation, files and devices of one node.

    files:    folder -> what `list_files` returns
    sees_run: the node sees the run directory
    devices:  count by the device driver's tool; None = not asked, or no tool
    sick:     devices that the tool calls unhealthy, each with its word
    """

    host: str
    versions: dict[str, str]
    files: dict[str, dict[str, str] | None]
    sees_run: bool
    devices: int | None = None
    sick: tuple[str, ...] = ()


def report_node(
    folders: Sequence[str], run_file: str | None, probe: DeviceKind | None = None
) -> NodeReport:
    """Return the report of this node.

    Args:
        folders: Read by workers; their files are listed.
        run_file: A file that the driver wrote to the run directory; None counts as seen.
        probe: Ask the driver's tool about this kind of device, which takes seconds; None = do not.
    """
    devices: int | None = None
    sick: tuple[str, ...] = ()
    if probe is not None:
        from mindspeed_rlxf.device.driver import query_driver  # brings in torch

        view = query_driver(probe)
        if view is not None and not view.problem:
            devices = len(view.devices)
            bad = (d for d in view.devices if d.health not in HEALTHY)
            sick = tuple(f"device {d.index}: {d.health}" for d in bad)
    return NodeReport(
        host=socket.gethostname(),
        versions=versions((*PACKAGES, *DEVICE_PACKAGES)),
        files={folder: list_files(folder) for folder in folders},
        sees_run=run_file is None or sees_file(run_file),
        devices=devices,
        sick=sick,
    )


def list_files(folder: str) -> dict[str, str] | None:
    """Return {path in the folder: fingerprint} of its model and tokenizer files; None = no folder.

    The entry WEIGHTS has the format and folder of the weights, or why there are none.
    """
    root = Path(folder)
    if not os.path.isdir(root):
        return None
    found, weights = {}, root
    try:
        kind, weights = find_weights(root)
        found[WEIGHTS] = f"{kind.value} in {weights.relative_to(root)}"
    except (ValueError, OSError) as error:  # other folders than the driver's, or no right to look
        found[WEIGHTS] = str(error).partition(";")[0]
    files = {*root.glob("*"), *weights.glob("*"), *weights.glob(f"mp_rank_*/{RANK_FILE}")}
    for file in sorted(files):
        name = str(file.relative_to(root))
        try:
            if not file.is_file():
                continue
            size = file.stat().st_size
            if file.suffix in HASHED and size <= MAX_HASHED:
                found[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
            elif file.name.endswith(SIZED):
                found[name] = f"{size} bytes"
        except OSError as error:
            found[name] = str(error.strerror)
    return found


def find_node_problems(
    driver: NodeReport,
    node: NodeReport,
    keys: Mapping[str, str],
    usual: Mapping[str, str] | None = None,
) -> list[str]:
    """Return texts on differences in versions and files that would change or fail a run.

    Our package and PACKAGES are compared with the driver's; other packages, which a driver without
    devices may lack, with `usual`. Only folders that the driver has are compared.

    Args:
        keys: Configuration keys that name a folder, by folder.
        usual: Versions that most nodes have, by package.
    """
    own = {name: driver.versions[name] for name in (OURS, *PACKAGES)}
    found = [
        f"{name} on {node.host} must be that of the {'driver' if name in own else 'other nodes'} "
        f"({wanted}), not {value}; install the same there, and start Ray on that host again"
        for name, value, wanted in find_differences(node.versions, {**(usual or {}), **own})
    ]
    for folder, files in driver.files.items():
        if files is None:  # a name of the hub; weights are looked at before
            continue
        title, there = f"{keys[folder]}={folder}", node.files[folder]
        remedy = f"copy the folder to {node.host}, or use one that every node shares"
        if there is None:
            missing = f"must be on every node; {node.host} has no such folder"
            found.append(f"{title} {missing}; {remedy}")
            continue
        differing = [  # files that only the node has do not count
            f"{name} ({there.get(name, 'missing')} there, {value} here)"
            for name, value in files.items()
            if there.get(name) != value
        ]
        if differing:
            shown, more = ", ".join(differing[:MAX_PROBLEMS]), len(differing) - MAX_PROBLEMS
            shown += f" and {more} more" if more > 0 else ""
            must = f"must be the same on every node; on {node.host}: {shown}"
            found.append(f"{title} {must}; {remedy}")
    return found


class NodeCheck:
    """Compares each node of a joined cluster once with the driver's node."""

    def __init__(
        self,
        ask: Callable[[Sequence[Node], Callable[..., NodeReport], tuple[Any, ...], float], Any],
        keys: Mapping[str, str],
        run_file: Path | None,
        timeout_s: float,
        probe: DeviceKind | None = None,
    ) -> None:
        """Store what to compare; nothing is compared yet.

        Args:
            ask: Runs a function on nodes, see `node_tools.ask_nodes`.
            keys: Folders that workers read, with the configuration keys that name each.
            probe: Exclude faulty nodes, also those whose driver calls a device of this kind sick;
                None = refuse faulty nodes.
        """
        self._ask, self._keys = ask, dict(keys)
        self._timeout_s, self._probe = timeout_s, probe
        self.excluded: set[str] = set()  # ids of nodes
        self._run_file = None if run_file is None else str(run_file)
        self._driver: NodeReport | None = None
        self._seen: dict[str, NodeReport] = {}

    def check(self, nodes: list[Node]) -> list[Node]:
        """Compare new nodes with the driver's; return `nodes` without the excluded ones.

        Waits up to `timeout_s` for the reports of new nodes. Warns once of a node to exclude.

        Raises:
            UserError: A node has a fault, and faulty nodes are refused.
        """
        usable = [node for node in nodes if node.id not in self.excluded]
        new = [node for node in usable if node.id not in self._seen]
        if not new:
            return usable
        driver = self._driver = self._driver or report_node(list(self._keys), self._run_file)
        arguments = list(self._keys), self._run_file, self._probe
        faults: dict[str, list[str]] = {}
        replies = self._ask(new, report_node, arguments, self._timeout_s)
        for node, reply in zip(new, replies, strict=True):
            if isinstance(reply, NodeReport):
                self._seen[node.id] = reply
            else:  # an import that fails there, or the node went away
                faults[node.id] = [
                    f"mindspeed_rlxf on {node.host} ({node.ip}) must be that of the driver "
                    f"({build_id()}): {reply.cause}; install the same there, and start Ray on that "
                    "host from that environment again"
                ]
        answered = {node.id: self._seen[node.id] for node in usable if node.id not in faults}
        for node in usable:  # those of earlier calls too: what most nodes have may change
            if seen := answered.get(node.id):
                faults[node.id] = [*seen.sick, *find_node_problems(driver, seen, self._keys)]
                if seen.devices is not None and seen.devices < node.count:
                    lists = f"its driver lists {seen.devices} of {node.count} devices"
                    faults[node.id].append(lists)
        good = {key: report for key, report in answered.items() if not faults[key]}
        usual = usual_versions([report.versions for report in good.values()])
        for key, report in good.items():  # the others have no vote
            faults[key] = find_node_problems(driver, report, self._keys, usual)
        if any(faults.values()) and self._probe is None:
            texts = dict.fromkeys(text for found in faults.values() for text in found)
            raise UserError([Problem("", text) for text in texts])
        for node in usable:
            if found := faults[node.id]:
                self.excluded.add(node.id)
                logger.warning("%s (%s) is excluded: %s", node.host, node.ip, "; ".join(found))
        return [node for node in usable if node.id not in self.excluded]

    def require_shared_folder(self, hosts: set[str]) -> None:
        """Raise UserError if one of the hosts of the run does not see the run directory."""
        apart = sorted({r.host for r in self._seen.values() if not r.sees_run} & hosts)
        if apart:
            raise UserError(unshared(", ".join(apart)))


def unshared(hosts: str) -> Problem:
    """Make the problem of hosts that do not see the run directory. hosts: names, for the message"""
    return Problem(
        "training.output_dir",
        f"must be on storage that all nodes share, {hosts} did not see the file that the driver "
        "wrote there",
        remedy="set it to a folder that is the same on every node",
    )


def sees_file(file: str) -> bool:
    """Wait up to SEEN_WITHIN_S for a file; return whether this node sees it."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not os.path.exists(file) and time.monotonic() < deadline:
        time.sleep(0.2)
    return os.path.exists(file)
