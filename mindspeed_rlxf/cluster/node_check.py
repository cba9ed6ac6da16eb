"""Compare the nodes of a joined cluster with the driver's node before devices are claimed.

Light to import: `report_node` runs on every node. Free of Ray.
"""

import functools
import hashlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspeed_rlxf
from mindspeed_rlxf.cluster.nodes import Node
from mindspeed_rlxf.config import packages
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.weights.formats import find_weights
from mindspeed_rlxf.weights.megatron_layout import RANK_FILE

logger = logging.getLogger(__name__)

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
    """Return the versions of this package (`build_id`) and of `names`, by name.

    "none" = not installed.
    """
    return {OURS: build_id(), **{name: packages.version(name) or NONE for name in names}}


def find_differences(
    installed: Mapping[str, str], expected: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    """Return (package, version, expected version) of each package with another version.

    A package that is not in `installed` has version NONE. What follows a `+` does not count:
    2.7.1+cpu, as on a head node without devices, equals 2.7.1.
    """
    found = [(name, installed.get(name, NONE), wanted) for name, wanted in expected.items()]
    return [each for each in found if _public(each[1]) != _public(each[2])]


def usual_versions(all_installed: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return by name the version that most hosts have, the first of equally frequent ones.

    all_installed: versions by package name of each host; a package that a host lacks has NONE there
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

    files:    folder -> what `list_files` returns; None = there is no folder
    sees_run: the node sees the run directory
    devices:  count by the tool of the device driver; None = not asked, or there is no tool
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
    """Return the report of this node: host name, versions, files, whether it sees the run, devices.

    folders:  read by workers; their files are listed
    run_file: a file that the driver wrote to the run directory; None counts as seen
    probe:    ask the tool of the device driver about this kind of device, which takes seconds;
              None = report no devices
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

    The files of the folder, of the weights' folder in it and of its rank folders. The entry
    `weights` has the format and folder of the weights, or why none were found.
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
    for file in sorted(
        {*root.glob("*"), *weights.glob("*"), *weights.glob(f"mp_rank_*/{RANK_FILE}")}
    ):
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

    Versions of our package and of PACKAGES are compared with the driver's, those of other packages,
    which a driver without devices may lack, with `usual`. Files are compared in folders that exist
    on the driver.
    keys:  folder -> the configuration keys that name it
    usual: version by package name, that of most nodes
    """
    own = {name: driver.versions[name] for name in (OURS, *PACKAGES)}
    found = [
        f"{name} on {node.host} must be that of the {'driver' if name in own else 'other nodes'} "
        f"({wanted}), not {value}; install the same there, and start Ray on that host again"
        for name, value, wanted in find_differences(node.versions, {**(usual or {}), **own})
    ]
    for folder, files in driver.files.items():
        if files is not None:  # None = a name of the hub; weights are looked at before
            title = f"{keys[folder]}={folder}"
            found += _compare_folder(title, node, files, node.files[folder])
    return found


def _compare_folder(
    title: str, node: NodeReport, expected: Mapping[str, str], found: Mapping[str, str] | None
) -> list[str]:
    """Return [a message on the files of a node's folder that differ from the driver's], or [].

    Files that only the node has do not count. The message names MAX_PROBLEMS files at most.
    title: key and folder
    expected, found: `list_files` of the driver and of the node; None = the node has no such folder
    """
    remedy = f"copy the folder to {node.host}, or use one that every node shares"
    if found is None:
        return [f"{title} must be on every node; {node.host} has no such folder; {remedy}"]
    differing = [
        f"{name} ({found.get(name, 'missing')} there, {value} here)"
        for name, value in expected.items()
        if found.get(name) != value
    ]
    if not differing:
        return []
    shown = ", ".join(differing[:MAX_PROBLEMS])
    more = f" and {len(differing) - MAX_PROBLEMS} more" if len(differing) > MAX_PROBLEMS else ""
    return [f"{title} must be the same on every node; on {node.host}: {shown}{more}; {remedy}"]


class NodeCheck:
    """Compares each node of a joined cluster once with the node of the driver process."""

    def __init__(
        self,
        ask: Callable[[Sequence[Node], Callable[..., NodeReport], tuple[Any, ...], float], Any],
        keys: Mapping[str, str],
        run_file: Path | None,
        timeout_s: float,
        probe: DeviceKind | None = None,
    ) -> None:
        """Store what to compare; nothing is compared yet."""
        self._ask, self._keys = ask, dict(keys)
        self._timeout_s, self._probe = timeout_s, probe
        self.left_out: set[str] = set()  # ids of nodes
        self._run_file = str(run_file) if run_file is not None else None
        self._driver: NodeReport | None = None
        self._seen: dict[str, NodeReport] = {}

    def check(self, nodes: list[Node]) -> list[Node]:
        """Compare nodes not seen before with the driver's; return `nodes` without those left out.

        Waits up to `timeout_s` for the reports of new nodes. With `probe` a faulty node is left out
        with a warning, in later calls too; without `probe` it raises UserError.
        """
        left = [node for node in nodes if node.id not in self.left_out]
        new = [node for node in left if node.id not in self._seen]
        if not new:
            return left
        self._driver = self._driver or report_node(list(self._keys), self._run_file)
        arguments = list(self._keys), self._run_file, self._probe
        silent = {}
        replies = self._ask(new, report_node, arguments, self._timeout_s)
        for node, reply in zip(new, replies, strict=True):
            if isinstance(reply, NodeReport):
                self._seen[node.id] = reply
            else:  # an import that fails there, or the node went away
                silent[node.id] = (
                    f"mindspeed_rlxf on {node.host} ({node.ip}) must be that of the driver "
                    f"({build_id()}): {reply.cause}; install the same there, and start Ray on that "
                    "host from that environment again"
                )
        faults = self._find_faults(left, silent)
        if any(faults.values()) and self._probe is None:
            texts = dict.fromkeys(text for found in faults.values() for text in found)
            raise UserError([Problem("", text) for text in texts])
        for node in left:
            if found := faults[node.id]:
                self.left_out.add(node.id)
                logger.warning("%s (%s) is left out: %s", node.host, node.ip, "; ".join(found))
        return [node for node in left if node.id not in self.left_out]

    def _find_faults(self, nodes: list[Node], silent: Mapping[str, str]) -> dict[str, list[str]]:
        """Return the faults of each node by its id; also nodes of earlier calls are compared again.

        silent: node id -> message, for nodes that gave no report
        """
        assert self._driver is not None, "asked first"
        faults = {}
        for node in nodes:
            if node.id in silent:
                faults[node.id] = [silent[node.id]]
                continue
            seen = self._seen[node.id]
            found = [*seen.sick, *find_node_problems(self._driver, seen, self._keys)]
            if seen.devices is not None and seen.devices < node.count:
                found.append(f"its driver lists {seen.devices} of {node.count} devices")
            faults[node.id] = found
        good = {key: self._seen[key] for key, found in faults.items() if not found}
        usual = usual_versions([report.versions for report in good.values()])
        for key, report in good.items():  # the others have no vote
            faults[key] = find_node_problems(self._driver, report, self._keys, usual)
        return faults

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
