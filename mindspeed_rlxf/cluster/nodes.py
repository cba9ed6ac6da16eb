"""Cluster nodes: devices, rank order, and comparison with the driver node.

Light to import and free of Ray: `report_node` runs on every node.
"""

import contextlib
import functools
import hashlib
import ipaddress
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import mindspeed_rlxf
from mindspeed_rlxf.config import packages
from mindspeed_rlxf.config.problems import Problem
from mindspeed_rlxf.weights.formats import find_weights
from mindspeed_rlxf.weights.megatron_layout import RANK_FILE

MAX_SHOWN = 16  # nodes in one message
OURS = "mindspeed_rlxf"
NONE = "none"  # the version of what is not installed
PACKAGES = ("torch", "transformers", packages.MEGATRON, "torch-npu", "mindspeed")
HASHED = (".json", ".jinja", ".txt", ".model")  # small: contents count; of others the size
SIZED = (".safetensors", ".distcp", ".metadata", "common.pt", RANK_FILE)  # compared by size
MAX_PROBLEMS = 3  # of one folder on one node
SEEN_WITHIN_S = 10.0  # network file systems show new files late

A = TypeVar("A")


@dataclass(frozen=True)
class Node:
    """A node with `count` devices, `free` of them unused."""

    id: str
    host: str
    ip: str
    count: int
    free: int


def address_key(ip: str) -> tuple[int, int]:
    """Return (IP version, numeric address), to sort 10.0.0.9 before 10.0.0.10."""
    address = ipaddress.ip_address(ip)
    return address.version, int(address)


def describe_shortage(
    pool: str, shape: Sequence[int], resource: str, address: str, nodes: Sequence[Node]
) -> str:
    """Return a message with the devices a pool needs, the nodes, and a hint."""
    counts = f"{shape[0]} on one node"
    if len(shape) > 1:
        counts = f"{list(shape)}, one entry per node"
    listed = [f"{n.host} ({n.ip}): {n.free} of {n.count} free" for n in nodes[:MAX_SHOWN]]
    if len(nodes) > MAX_SHOWN:
        listed.append(f"and {len(nodes) - MAX_SHOWN} more nodes")
    return (
        f"resource_pool.{pool} needs {resource}: {counts}; the cluster at {address} has "
        f"{', '.join(listed) or 'no node that has any'}; ask for less, free some, or start Ray on "
        f"more nodes with --resources='{{\"{resource}\": COUNT}}' (device.devices_per_node is what "
        "a count fills)"
    )


@dataclass(frozen=True)
class Place:
    """Where a worker process runs."""

    host: str
    ip: str
    entry: int  # index in `processes_per_node`
    devices: tuple[int, ...]  # ids that Ray gave it; empty for logical devices
    node: str = ""  # Ray's id of the node


def order_ranks(processes: Sequence[tuple[A, Place]]) -> tuple[tuple[A, ...], tuple[Place, ...]]:
    """Sort processes into rank order, by node and then device; return (processes, places).

    Nodes come in the order of `processes_per_node` (`Place.entry`). Ray may swap nodes with equally
    many processes: these are sorted by address, so a restart gives the same ranks.
    """
    sizes = Counter(place.entry for _, place in processes)
    address = {place.entry: address_key(place.ip) for _, place in processes}
    position: dict[int, int] = {}
    for size in set(sizes.values()):
        entries = sorted(entry for entry in sizes if sizes[entry] == size)
        by_address = sorted(entries, key=lambda entry: (address[entry], entry))
        position |= dict(zip(by_address, entries, strict=True))
    ordered = sorted(processes, key=lambda pair: (position[pair[1].entry], pair[1].devices))
    return tuple(process for process, _ in ordered), tuple(place for _, place in ordered)


def describe_places(places: Sequence[Place]) -> str:
    """Return places in rank order, as `ranks 0-7 on node1 (10.0.0.1), rank 8 on ...`."""
    texts = []
    first_rank = 0
    for (host, ip), group in groupby(places, key=lambda place: (place.host, place.ip)):
        last_rank = first_rank + len(list(group)) - 1
        ranks = f"rank {first_rank}"
        if last_rank > first_rank:
            ranks = f"ranks {first_rank}-{last_rank}"
        texts.append(f"{ranks} on {host} ({ip})")
        first_rank = last_rank + 1
    return ", ".join(texts)


@functools.cache
def build_id() -> str:
    """Return the package version with a source hash: `0.1.0, sources 3f2a91c07d4e`."""
    sources = hash_sources(Path(mindspeed_rlxf.__file__).parent)
    return f"{mindspeed_rlxf.__version__}, sources {sources}"


def hash_sources(folder: Path) -> str:
    """Hash Python file names and contents below a folder; 12 hexadecimal digits."""
    hashed = hashlib.sha256()
    for file in sorted(folder.rglob("*.py"), key=lambda file: file.relative_to(folder).as_posix()):
        hashed.update(file.relative_to(folder).as_posix().encode() + b"\0")
        hashed.update(hashlib.sha256(file.read_bytes()).digest())
    return hashed.hexdigest()[:12]


def versions(names: Sequence[str]) -> dict[str, str]:
    """Return versions for this package (`build_id`) and for `names`; NONE if not installed."""
    return {OURS: build_id(), **{name: packages.version(name) or NONE for name in names}}


def find_differences(
    installed: Mapping[str, str], expected: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    """Return (package, version, expected version) for each package with another version.

    Ignores text after a `+`: 2.7.1+cpu, as on a head node without devices, equals 2.7.1.
    """
    differences = []
    for name, expected_version in expected.items():
        version = installed.get(name, NONE)
        if version.partition("+")[0] != expected_version.partition("+")[0]:
            differences.append((name, version, expected_version))
    return differences


@dataclass(frozen=True)
class NodeReport:
    """Installation and files on one node."""

    host: str
    versions: dict[str, str]
    files: dict[str, dict[str, str] | None]  # `list_files` by folder
    sees_run: bool  # sees the run directory


def report_node(folders: Sequence[str], run_file: str | None) -> NodeReport:
    """Report this node and its files in `folders`, which workers read.

    `run_file` is a file the driver wrote to the run directory; None counts as seen.
    """
    return NodeReport(
        host=socket.gethostname(),
        versions=versions(PACKAGES),
        files={folder: list_files(folder) for folder in folders},
        sees_run=run_file is None or sees_file(run_file),
    )


def list_files(folder: str) -> dict[str, str] | None:
    """Return model and tokenizer files as {path in the folder: fingerprint}; None without a folder.

    For Megatron weights, lists the files in the iteration to load.
    """
    root = Path(folder)
    if not os.path.isdir(root):
        return None
    weights = root
    with contextlib.suppress(ValueError, OSError):  # no weights there: then only files are listed
        weights = find_weights(root)[1]
    fingerprints = {}
    for file in {*root.glob("*"), *weights.glob("*"), *weights.glob(f"mp_rank_*/{RANK_FILE}")}:
        name = str(file.relative_to(root))
        try:
            if file.suffix in HASHED:
                fingerprints[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
            elif file.name.endswith(SIZED):
                fingerprints[name] = f"{file.stat().st_size} bytes"
        except OSError as error:
            fingerprints[name] = str(error.strerror)
    return dict(sorted(fingerprints.items()))


def find_node_problems(driver: NodeReport, node: NodeReport, keys: Mapping[str, str]) -> list[str]:
    """Describe version and file differences that would change or fail a run.

    Compares packages and folders present on the driver, which may lack device packages. Ignores
    files only the node has. `keys` has the configuration keys that name a folder, by folder.
    """
    expected = {name: version for name, version in driver.versions.items() if version != NONE}
    problems = [
        f"{name} on {node.host} must be that of the driver ({driver_version}), not {version}; "
        "install the same there, and start Ray on that host again"
        for name, version, driver_version in find_differences(node.versions, expected)
    ]
    for folder, driver_files in driver.files.items():
        if driver_files is None:  # a name of the hub; weights are looked at before
            continue
        key = f"{keys[folder]}={folder}"
        remedy = f"copy the folder to {node.host}, or use one that every node shares"
        node_files = node.files[folder]
        if node_files is None:
            rule = f"must be on every node; {node.host} has no such folder"
            problems.append(f"{key} {rule}; {remedy}")
            continue
        differing = [
            f"{name} ({node_files.get(name, 'missing')} there, {fingerprint} here)"
            for name, fingerprint in driver_files.items()
            if node_files.get(name) != fingerprint
        ]
        if differing:
            listed = ", ".join(differing[:MAX_PROBLEMS])
            num_unlisted = len(differing) - MAX_PROBLEMS
            if num_unlisted > 0:
                listed += f" and {num_unlisted} more"
            rule = f"must be the same on every node; on {node.host}: {listed}"
            problems.append(f"{key} {rule}; {remedy}")
    return problems


def unshared(hosts: str) -> Problem:
    """Return the problem for hosts that do not see the run directory."""
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
