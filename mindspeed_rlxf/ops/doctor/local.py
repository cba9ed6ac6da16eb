"""List and run all checks of one host; each host of a cluster runs the same."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from mindspeed_rlxf.cluster.ray.cluster import object_store_bytes
from mindspeed_rlxf.ops.doctor import devices, disk, host, leftovers, network, npu, software
from mindspeed_rlxf.ops.doctor.findings import Finding, Probe, Status, error, judge, run_probes
from mindspeed_rlxf.ops.doctor.subject import Subject

VERSIONS_S, DEVICES_S, DISK_S, FILES_S = 20.0, 65.0, 30.0, 20.0
NPU_S = 30.0  # npu-smi takes some seconds; two commands for each link


def probes(subject: Subject) -> list[Probe]:
    """Return the checks of this host, each with its deadline; none has run yet."""
    kind, several = subject.kind, subject.several_hosts
    return [
        Probe("versions", partial(software.check_software, kind), VERSIONS_S),
        Probe("devices", partial(devices.check_devices, kind), DEVICES_S),
        Probe("npu", partial(npu.check_install, kind), NPU_S),
        Probe("npu.cards", partial(npu.check_cards, kind, several), NPU_S),
        *(Probe(f"host.{check.__name__}", check) for check in host.CHECKS),
        Probe("memory.shared", partial(host.shared_memory, object_store_bytes())),
        Probe("disk.output", partial(disk.output_folder, Path(subject.output_dir)), DISK_S),
        Probe("disk.ray_folder", disk.ray_folder),
        Probe("disk.model_cache", disk.model_cache),
        Probe("network", partial(network.check_network, several)),
        Probe("network.host_name", partial(network.host_name, several)),
        Probe("ray.leftovers", leftovers.check_leftovers, FILES_S),
        Probe("files", partial(file_findings, subject.paths), FILES_S),
    ]


def check_host(subject: Subject) -> list[Finding]:
    """Run all checks of this host; return the findings after the longest deadline at the latest."""
    return run_probes(probes(subject))


def file_findings(paths: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """Yield one error with all missing input files, or `ok`; then one with all unreadable files.

    The second comes only if there are such files.
    paths: (key of the configuration, path or glob pattern); without paths, nothing is yielded
    """
    files = {(key, path): glob.glob(path) for key, path in paths}
    missing = [f"{key}={path}" for (key, path), found in files.items() if not found]
    closed = [
        f"{k}={f}" for (k, _), found in files.items() for f in found if not os.access(f, os.R_OK)
    ]
    if paths:
        value = (
            f"missing: {', '.join(missing)}"
            if missing
            else f"{len(paths)} paths of the configuration"
        )
        yield judge(
            not missing,
            "files.there",
            value,
            "correct the path, or copy or mount it on this host",
            Status.ERROR,
        )
    if closed:
        yield error(
            "files.readable",
            f"no right to read {', '.join(closed)}",
            "give this user the right to read it",
        )
