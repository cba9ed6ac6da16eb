"""Compare the nodes of a joined cluster with the driver's node before devices are claimed.

Light to import: `report_node` runs on every node. Free of Ray.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rlxf.cluster.errors import HostError
from mindspeed_rlxf.cluster.host_agent import HostAgent, collect_outcomes
from mindspeed_rlxf.cluster.installed import (
    OURS,
    build_id,
    find_differences,
    usual_versions,
    versions,
)
from mindspeed_rlxf.cluster.nodes import Node
from mindspeed_rlxf.config import packages
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.weights.formats import Format, find_weights
from mindspeed_rlxf.weights.layout import RANK_FILE

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", packages.MEGATRON)
DEVICE_PACKAGES = ("torch-npu", "mindspeed")  # a driver on a node without devices may lack them
HASHED = (".json", ".jinja", ".txt", ".model")  # small: contents count; of others the size
OF_HF: tuple[str, ...] = (".safetensors",)  # files compared by size
OF_MEGATRON = (".distcp", ".metadata", ".pt")
WEIGHTS = "weights"  # the entry with the format and folder of the weights
MAX_HASHED = 64 * 2**20
HEALTHY = ("OK", "")  # words of the tools of device drivers
MAX_PROBLEMS = 3  # of one folder on one node
SEEN_WITHIN_S = 10.0  # network file systems show new files late


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
    devices, sick = _probe_devices(probe) if probe is not None else (None, ())
    return NodeReport(
        host=socket.gethostname(),
        versions=versions((*PACKAGES, *DEVICE_PACKAGES)),
        files={folder: list_files(folder) for folder in folders},
        sees_run=run_file is None or sees_file(run_file),
        devices=devices,
        sick=sick,
    )


def _probe_devices(kind: DeviceKind) -> tuple[int | None, tuple[str, ...]]:
    """Return the number of devices of this host, and a text for each unhealthy one.

    (None, ()) where the kind has no driver, or the driver's tool is missing or fails.
    """
    from mindspeed_rlxf.device.driver import query_driver  # brings in torch

    view = query_driver(kind)
    if view is None or view.problem:
        return None, ()
    sick = [f"device {d.index}: {d.health}" for d in view.devices if d.health not in HEALTHY]
    return len(view.devices), tuple(sick)


def list_files(folder: str) -> dict[str, str] | None:
    """Return {path in the folder: fingerprint} of its model and tokenizer files; None = no folder.

    Looks at files directly in the folder, in the folder that `find_weights` names, and at those of
    the latter's rank folders. `_fingerprint` chooses among them, and hash or size. The entry
    `weights` has the format and folder of the weights, or why none were found.
    """
    root = Path(folder)
    if not os.path.isdir(root):
        return None
    found, weights, sized = {}, root, OF_HF
    try:
        kind, weights = find_weights(root)
        found[WEIGHTS] = f"{kind.value} in {weights.relative_to(root)}"
        sized = OF_HF if kind in (Format.HF, Format.RUN_STATE) else OF_MEGATRON
    except (ValueError, OSError) as error:  # other folders than the driver's, or no right to look
        found[WEIGHTS] = str(error).partition(";")[0]
    for file in sorted(
        {*root.glob("*"), *weights.glob("*"), *weights.glob(f"mp_rank_*/{RANK_FILE}")}
    ):
        fingerprint = _fingerprint(file, sized)
        if fingerprint is not None:
            found[str(file.relative_to(root))] = fingerprint
    return found


def _fingerprint(file: Path, sized: tuple[str, ...]) -> str | None:
    """Return the hash of a file with a suffix of HASHED, or the size of one that ends as `sized`.

    The hash has 12 hexadecimal digits, the size is "N bytes"; the error's text for a file that
    cannot be read. None for other files, for HASHED ones over MAX_HASHED, and what is no file.
    sized: endings of the names of files that are compared by size
    """
    try:
        if not file.is_file():
            return None
        size = file.stat().st_size
        if file.suffix in HASHED and size <= MAX_HASHED:
            return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    except OSError as error:
        return str(error.strerror)
    return f"{size} bytes" if file.name.endswith(sized) else None


def find_node_problems(
    driver: NodeReport,
    nodes: Sequence[NodeReport],
    keys: Mapping[str, str],
    usual: Mapping[str, str] | None = None,
) -> list[str]:
    """Return texts on differences in versions and files that would change or fail a run, once each.

    Versions of our package and of PACKAGES are compared with the driver's, those of other packages
    with `usual`. Files are compared in folders that exist on the driver.
    keys:  folder -> the configuration keys that name it
    usual: version by package name; None = those that most of `nodes` have
    """
    expected = {name: driver.versions[name] for name in (OURS, *PACKAGES)}
    if usual is None:
        usual = usual_versions([node.versions for node in nodes])
    found = [  # packages for devices are compared among the nodes: a driver may lack them
        f"{d.name} on {host} must be that of "
        f"{'the driver' if d.name in expected else 'the other nodes'} ({d.expected}), not "
        f"{d.value}; install the same there, and start Ray on that host again"
        for d in find_differences(
            ((node.host, node.versions) for node in nodes), {**usual, **expected}
        )
        for host in d.hosts
    ]
    for node in nodes:
        for folder, files in driver.files.items():
            if files is not None:  # None = a name of the hub; weights are looked at before
                found += _compare_folder(
                    f"{keys[folder]}={folder}", node, files, node.files[folder]
                )
    return list(dict.fromkeys(found))


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
        agent_on: Callable[[str, str], HostAgent],
        keys: Mapping[str, str],
        run_file: Path | None,
        timeout_s: float,
        probe: DeviceKind | None = None,
    ) -> None:
        """Store what to compare; nothing is compared yet.

        agent_on: returns the agent of a node, by id and host
        keys:     folder that workers read -> the configuration keys that name it
        run_file: a file of the run directory: nodes that see it share the directory
        probe:    leave out nodes that do not answer, differ, or have sick devices of this kind;
                  None = refuse them
        """
        self._agent_on, self._keys = agent_on, dict(keys)
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
        new = [node for node in nodes if node.id not in {*self._seen, *self.left_out}]
        if new:
            self._driver = self._driver or report_node(list(self._keys), self._run_file)
            reports, silent = self._collect_reports(new)
            self._seen.update(reports)
            left = [node for node in nodes if node.id not in self.left_out]
            self._refuse_or_leave_out(left, silent)
        return [node for node in nodes if node.id not in self.left_out]

    def _refuse_or_leave_out(self, nodes: list[Node], silent: Mapping[str, str]) -> None:
        """Add faulty nodes to `left_out` with warnings; without `probe` raise UserError instead.

        The error names the faults of all nodes. Nodes are faulty that gave no report, or whose
        report differs from the driver's or the other nodes' or, with `probe`, names sick or too few
        devices. Nodes with other faults do not count among the others.
        nodes:  all that are there and not left out, also those of earlier calls: which packages for
                devices are usual may have changed
        silent: node id -> message, for nodes that gave no report
        """
        assert self._driver is not None, "asked first"
        if self._probe is None:
            reports = [self._seen[node.id] for node in nodes if node.id not in silent]
            wrong = [*silent.values(), *find_node_problems(self._driver, reports, self._keys)]
            if wrong:
                raise UserError([Problem("", text) for text in wrong])
            return
        faults = {node.id: self._find_faults(node, silent) for node in nodes}
        good = {node.id: self._seen[node.id] for node in nodes if not faults[node.id]}
        usual = usual_versions([report.versions for report in good.values()])
        for key, report in good.items():  # the others have no vote
            faults[key] = find_node_problems(self._driver, [report], self._keys, usual)
        for node in nodes:
            if found := faults[node.id]:
                self.left_out.add(node.id)
                logger.warning("%s (%s) is left out: %s", node.host, node.ip, "; ".join(found))

    def _find_faults(self, node: Node, silent: Mapping[str, str]) -> list[str]:
        """Return texts on the faults that a node has whatever the other nodes have; [] for none.

        These are, in order, no report, sick devices, what differs from the driver's node, and fewer
        devices than Ray counts.
        """
        assert self._driver is not None, "asked first"
        if node.id in silent:
            return [silent[node.id]]
        seen = self._seen[node.id]
        differing = find_node_problems(self._driver, [seen], self._keys)
        found = [*seen.sick, *differing]
        if seen.devices is not None and seen.devices < node.count:
            found.append(f"its driver lists {seen.devices} of {node.count} devices")
        return found

    def require_shared_folder(self, hosts: set[str]) -> None:
        """Raise UserError if one of the hosts of the run does not see the run directory."""
        apart = sorted({r.host for r in self._seen.values() if not r.sees_run} & hosts)
        if apart:
            raise UserError(unshared(", ".join(apart)))

    def _collect_reports(self, nodes: list[Node]) -> tuple[dict[str, NodeReport], dict[str, str]]:
        """Ask all nodes for their reports and wait; return (reports, messages), both by node id.

        A node that gives no report has a message that says why.
        """
        arguments = list(self._keys), self._run_file, self._probe
        calls = [
            self._agent_on(node.id, node.host).start(
                report_node, *arguments, timeout_s=self._timeout_s
            )
            for node in nodes
        ]
        found, silent = {}, {}
        for node, reply in zip(nodes, collect_outcomes(calls), strict=True):
            if isinstance(reply, HostError):  # an import that fails there, or the node went away
                silent[node.id] = _describe_silence(node, reply.cause)
            else:
                found[node.id] = reply
        return found, silent


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


def _describe_silence(node: Node, what: str) -> str:
    """Return the message for a node that could not report, with a remedy. what: the cause"""
    return (
        f"mindspeed_rlxf on {node.host} ({node.ip}) must be that of the driver ({build_id()}): "
        f"{what}; install the same there, and start Ray on that host from that environment again"
    )
