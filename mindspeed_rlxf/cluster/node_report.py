"""What a node has installed and which files it sees, compared with the driver's before a start.

Light to import: it runs in a task on every node before a device is claimed.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rlxf import packages
from mindspeed_rlxf.cluster.installed import OURS, differences, versions
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.weights.formats import Format, find_weights
from mindspeed_rlxf.weights.layout import RANK_FILE

PACKAGES = ("torch", "transformers", packages.MEGATRON)
DEVICE_PACKAGES = ("torch-npu", "mindspeed")  # a driver on a node without devices may lack them
HASHED = (".json", ".jinja", ".txt", ".model")  # small: contents count; of others the size
OF_HF: tuple[str, ...] = (".safetensors",)
OF_MEGATRON = (".distcp", ".metadata", ".pt")
WEIGHTS = "weights"  # the entry that says in which format and where
MAX_HASHED = 64 * 2**20
HEALTHY = ("OK", "")  # words of the tools
MAX_PROBLEMS = 3  # of one folder on one node


@dataclass(frozen=True)
class NodeReport:
    """files: folder -> name -> what its contents are known by, None = there is no folder

    sees_run: the run directory too

    devices: that the driver's tool lists, None = not asked, or there is no tool
    sick:    devices that it calls unhealthy, each with its word
    """

    host: str
    versions: dict[str, str]
    files: dict[str, dict[str, str] | None]
    sees_run: bool
    devices: int | None = None
    sick: tuple[str, ...] = ()


def report(
    folders: Sequence[str], run_file: str | None, probe: DeviceKind | None = None
) -> NodeReport:
    """Of the node that this runs on.

    folders:  that workers read
    run_file: a file of the run directory that the driver has written
    probe:    ask the driver's tool about devices of this kind, which takes seconds
    """
    devices, sick = _health(probe) if probe is not None else (None, ())
    return NodeReport(
        host=socket.gethostname(),
        versions=versions((*PACKAGES, *DEVICE_PACKAGES)),
        files={folder: contents(folder) for folder in folders},
        sees_run=run_file is None or os.path.exists(run_file),
        devices=devices,
        sick=sick,
    )


def _health(kind: DeviceKind) -> tuple[int | None, tuple[str, ...]]:
    """Devices of this host, and the sick ones."""
    from mindspeed_rlxf.device.driver import driver_view  # brings in torch

    view = driver_view(kind)
    if view is None or view.problem:
        return None, ()
    sick = [f"device {d.index}: {d.health}" for d in view.devices if d.health not in HEALTHY]
    return len(view.devices), tuple(sick)


def contents(folder: str) -> dict[str, str] | None:
    """Name of each model or tokenizer file -> hash or size; None where there is no folder.

    Files of Megatron's weights count where they lie, below an iteration and the ranks.
    """
    root = Path(folder)
    if not os.path.isdir(root):
        return None
    found, place, sized = {}, root, OF_HF
    try:
        kind, place = find_weights(root)
        found[WEIGHTS] = f"{kind.value} in {place.relative_to(root)}"
        sized = OF_HF if kind in (Format.HF, Format.RUN_STATE) else OF_MEGATRON
    except (ValueError, OSError) as error:  # other folders than the driver's, or no right to look
        found[WEIGHTS] = str(error).partition(";")[0]
    for file in sorted({*root.glob("*"), *place.glob("*"), *place.glob(f"mp_rank_*/{RANK_FILE}")}):
        known_by = _known_by(file, sized)
        if known_by is not None:
            found[str(file.relative_to(root))] = known_by
    return found


def _known_by(file: Path, sized: tuple[str, ...]) -> str | None:
    """Hash of a small file, size of one that ends in `sized`; None for others."""
    try:
        if not file.is_file():
            return None
        size = file.stat().st_size
        if file.suffix in HASHED and size <= MAX_HASHED:
            return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    except OSError as error:
        return str(error.strerror)
    return f"{size} bytes" if file.name.endswith(sized) else None


def problems(driver: NodeReport, nodes: Sequence[NodeReport], keys: Mapping[str, str]) -> list[str]:
    """Differences that would fail a run, or change it, later; each names the host.

    keys: folder -> the configuration keys that name it
    """
    expected = {name: driver.versions[name] for name in (OURS, *PACKAGES)}
    found = [  # packages for devices are compared among the nodes: a driver may lack them
        f"{d.name} on {host} must be that of "
        f"{'the driver' if d.name in expected else 'the other nodes'} ({d.expected}), not "
        f"{d.value}; install the same there, and start Ray on that host again"
        for d in differences(((node.host, node.versions) for node in nodes), expected)
        for host in d.hosts
    ]
    for node in nodes:
        for folder, files in driver.files.items():
            if files is not None:  # a name of the hub; weights are looked at before
                found += _folder(f"{keys[folder]}={folder}", node, files, node.files[folder])
    return list(dict.fromkeys(found))


def _folder(
    title: str, node: NodeReport, expected: Mapping[str, str], found: Mapping[str, str] | None
) -> list[str]:
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
