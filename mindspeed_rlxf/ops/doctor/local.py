"""All checks of one host. Picklable, so that the same runs on every host of a cluster."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from mindspeed_rlxf.cluster.ray.cluster import object_store_bytes
from mindspeed_rlxf.ops.doctor import devices, disk, host, leftovers, network, software
from mindspeed_rlxf.ops.doctor.findings import Finding, Probe, error, ok, run_probes
from mindspeed_rlxf.ops.doctor.subject import Subject

VERSIONS_S, DEVICES_S, DISK_S, FILES_S = 20.0, 65.0, 30.0, 20.0


def probes(subject: Subject) -> list[Probe]:
    kind, hosts = subject.kind, subject.several_hosts
    folder = Path(subject.output_dir)
    return [
        Probe("versions", partial(software.look, kind), VERSIONS_S),
        Probe("devices", partial(devices.look, kind), DEVICES_S),
        *(Probe(f"host.{look.__name__}", partial(_one, look)) for look in host.LOOKS),
        Probe("memory.shared", partial(_one, partial(host.shared_memory, object_store_bytes()))),
        Probe("disk.output", partial(disk.output_folder, folder), DISK_S),
        Probe("disk.ray_folder", partial(_one, disk.ray_folder)),
        Probe("disk.model_cache", partial(_one, disk.model_cache)),
        Probe("network", partial(network.look, hosts)),
        Probe("network.host_name", partial(_one, partial(network.host_name, hosts))),
        Probe("ray.leftovers", leftovers.look, FILES_S),
        *([Probe("files", partial(files, subject.paths), FILES_S)] if subject.paths else []),
    ]


def look(subject: Subject) -> list[Finding]:
    """Findings of this host, within the longest of the deadlines."""
    return run_probes(probes(subject))


def files(paths: Sequence[tuple[str, str]]) -> list[Finding]:
    """Whether every file that the run reads is here and may be read."""
    found = []
    missing = [f"{key}={path}" for key, path in paths if not glob.glob(path)]
    if missing:
        remedy = "correct the path, or copy or mount it on this host"
        found.append(error("files.there", f"missing: {', '.join(missing)}", remedy))
    closed = [
        f"{key}={file}"
        for key, path in paths
        for file in glob.glob(path)
        if not os.access(file, os.R_OK)
    ]
    if closed:
        remedy = "give this user the right to read it"
        found.append(error("files.readable", f"no right to read {', '.join(closed)}", remedy))
    return found or [ok("files.there", f"{len(paths)} paths of the configuration")]


def _one(look: Callable[[], Finding]) -> list[Finding]:
    return [look()]
