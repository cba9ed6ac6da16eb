"""Checks of one host; each host of a cluster runs the same."""

from __future__ import annotations

import glob
import math
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from queue import Empty, Queue

import psutil  # type: ignore[import-untyped]
from packaging.requirements import Requirement

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster.ray.cluster import object_store_bytes
from mindspeed_rlxf.config import packages
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.device import npu_versions
from mindspeed_rlxf.device.control_group import (
    FOLDER,
    Amount,
    read_amount,
    read_memory_used,
    read_processors,
)
from mindspeed_rlxf.device.driver import DriverView, list_device_files, query_driver
from mindspeed_rlxf.device.npu_versions import Checked, Host
from mindspeed_rlxf.ops.doctor.report import Finding, Status, describe, error, judge, ok, warning
from mindspeed_rlxf.ops.sizes import GIB, existing_folder, format_bytes
from mindspeed_rlxf.run.directory import RunDirectory

DISTRIBUTION = "mindspeed-rlxf"
OLDEST_PYTHON = (3, 10, 0)
REQUIRED = ("torch", "ray", "transformers", "safetensors", "numpy")
HEALTHY = ("OK", "")
BUSY_MIB = 4096  # the driver itself takes up to 3 GiB of an idle device
OPEN_FILES = 32768  # asked for by the guides of MindSpeed; Ray opens some for each worker
PROCESSES = 4096
LEAST_BYTES = 2 * GIB  # with less, not even a small run with its Ray processes fits
LITTLE_FREE = 10 * GIB
RAY_FULL = 0.95  # fraction in use from which Ray takes no more objects to disk
# Of these variables the first two list whole names, the others prefixes (`=`: exact, `^`: not).
EXACT = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
BY_PREFIX = ("HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Subject:
    """The device kind, folder and files to check. Picklable: every host of a cluster gets it.

    output_dir:    absolute path of the run directory
    paths:         pairs (key of the configuration, path or glob pattern that the run reads)
    several_hosts: the run uses more than one host, so network checks need non-loopback addresses
    resource:      name of the Ray resource for one device; None = the default name of the kind
    """

    kind: DeviceKind
    output_dir: str
    paths: tuple[tuple[str, str], ...] = ()
    several_hosts: bool = False
    resource: str | None = None


def choose_subject(config: RunConfig | None, kind: DeviceKind, several_hosts: bool) -> Subject:
    """Return what to check: the device, run directory and input files of the configuration.

    config: None = no input files, and `./outputs` as the output folder
    kind:   replaces the configuration's; `auto` = take the configuration's
    """
    if config is None:
        return Subject(kind, str(Path("outputs").absolute()), (), several_hosts)
    training, data = config.training, config.data
    name = training.tokenizer_name_or_path
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cached = home / "hub" / f"models--{name.replace('/', '--')}"
    inputs = [
        ("training.tokenizer_name_or_path", str(cached) if cached.exists() else name),
        *((f"{role.value}.load", config.role(role).load or "") for role in config.roles),
        *(("data.train_files", file) for file in data.train_files),
        *(("data.val_files", file) for file in data.val_files),
        *(("data.data_path", f"{prefix}_packed_*") for prefix in data.data_path),
        *(("data.val_data_path", f"{prefix}_packed_*") for prefix in data.val_data_path),
        ("actor_rollout.fixed_responses", config.actor_rollout.fixed_responses or ""),
    ]
    return Subject(
        kind if kind is not DeviceKind.AUTO else config.device.kind,
        str(RunDirectory.choose(config).path),
        tuple((key, str(Path(path).absolute())) for key, path in inputs if path),
        several_hosts,
        config.device.resource_name,
    )


@dataclass(frozen=True)
class Probe:
    """One or more checks that run in a thread of their own.

    look:       returns findings; an exception becomes a warning
    deadline_s: after it a warning is reported; the thread goes on and ends with the process
    """

    name: str
    look: Callable[[], Finding | Iterable[Finding]]
    deadline_s: float = 10.0


def probes(subject: Subject) -> list[Probe]:
    """Return the checks of this host, each with its deadline; none has run yet."""
    kind, several = subject.kind, subject.several_hosts
    return [
        Probe("versions", partial(check_software, kind), 20.0),
        Probe("devices", partial(check_devices, kind), 65.0),  # an NPU's torch may load for 40 s
        Probe("npu", partial(check_install, kind, several), 30.0),
        Probe("limits", check_limits),
        Probe("memory", lambda: [check_memory(), shared_memory(object_store_bytes())]),
        Probe("disk", partial(check_disk, Path(subject.output_dir))),
        Probe("network", partial(check_network, several)),
        Probe("files", partial(file_findings, subject.paths), 20.0),
    ]


def check_host(subject: Subject) -> list[Finding]:
    """Run all checks of this host; return the findings after the longest deadline at the latest."""
    return run_probes(probes(subject))


def run_probes(probes: Sequence[Probe]) -> list[Finding]:
    """Run all probes at once in threads; one that raises or is late becomes a warning."""

    def run(probe: Probe, queue: Queue[list[Finding]]) -> None:
        try:
            found = probe.look()
            queue.put([found] if isinstance(found, Finding) else list(found))
        except Exception as problem:
            value = f"the check itself failed ({describe(problem)})"
            queue.put([warning(probe.name, value, "check it by hand")])

    started = time.monotonic()
    queues: list[Queue[list[Finding]]] = [Queue() for _ in probes]
    for probe, queue in zip(probes, queues, strict=True):
        threading.Thread(target=run, args=(probe, queue), daemon=True).start()
    found: list[Finding] = []
    for probe, queue in zip(probes, queues, strict=True):
        try:
            found += queue.get(timeout=max(started + probe.deadline_s - time.monotonic(), 0))
        except Empty:
            value = f"no answer within {probe.deadline_s:g} s"
            remedy = "what the check asks hangs or is very slow: check it by hand"
            found.append(warning(probe.name, value, remedy))
    return found


def check_software(kind: DeviceKind) -> Iterator[Finding]:
    """Check versions of Python and packages; for NPU also CANN and which versions fit together.

    Beside REQUIRED, an NPU needs torch's package for it, other kinds need megatron-core.
    """
    is_npu = device.resolve_kind(kind) is DeviceKind.NPU
    yield judge(
        sys.version_info[:3] >= OLDEST_PYTHON,
        "versions.python",
        f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}",
        "install Python 3.10 or newer",
        Status.ERROR,
    )
    required = (*REQUIRED, npu_versions.TORCH_NPU if is_npu else packages.MEGATRON)
    versions = {name: packages.version(name) for name in npu_versions.PACKAGES}
    yield from package_findings(versions, required, _requirements())
    if not is_npu:
        return
    cann = npu_versions.cann_version()
    yield judge(
        cann is not None,
        "versions.cann",
        cann or "no CANN found",
        "install CANN, and source its set_env.sh before `ray start` and the run",
        Status.ERROR,
    )
    modules = ("megatron.core", "megatron.training", "mindspeed")
    folders = {module: packages.folder_of(module) for module in modules}
    yield ok("versions.sources", ", ".join(f"{m} from {f}" for m, f in folders.items() if f))
    yield from map(_as_finding, npu_versions.check_versions())


def package_findings(
    versions: Mapping[str, str | None],
    required: tuple[str, ...],
    requirements: Mapping[str, Requirement],
) -> Iterator[Finding]:
    """Yield a finding per package; None is the version of one that is not installed."""
    for name, version in versions.items():
        check, wanted = f"versions.{name}", requirements.get(name)
        if version is None:
            if name in required:
                remedy = f"pip install '{wanted or name}' (tested sets: constraints/)"
                yield error(check, "not installed", remedy)
        elif wanted is not None and not wanted.specifier.contains(version, prereleases=True):
            value = f"{version}, outside of {wanted.specifier}"
            yield warning(check, value, f"pip install '{wanted}'")
        else:
            yield ok(check, version)


def _requirements() -> dict[str, Requirement]:
    """Map each dependency of this package that applies here to its requirement."""
    try:
        parsed = map(Requirement, requires(DISTRIBUTION) or [])
    except PackageNotFoundError:  # run from its sources
        return {}
    return {each.name: each for each in parsed if each.marker is None or each.marker.evaluate()}


def check_devices(kind: DeviceKind) -> list[Finding]:
    """Return findings on this host's accelerators: kind, the driver's list, torch's number."""
    try:
        kind = device.resolve_kind(kind)
        counted = device.count_by_torch(kind)
    except Exception as problem:
        remedy = "repair the installation, or set device.kind=cpu"
        return [error("devices.torch", describe(problem), remedy)]
    view = query_driver(kind)
    if counted is None or view is None:  # a CPU
        unused = list_device_files()
        value = f"cpu, though there are {', '.join(unused)}" if unused else "cpu, no accelerator"
        remedy = "install the build of torch (and its plug-in) for these devices"
        return [judge(not unused, "devices.kind", value, remedy)]
    visible = device.visible_devices_variable(kind)
    hidden = os.environ.get(visible) if visible else None
    return [
        ok("devices.kind", kind.value),
        *driver_findings(view),
        count_finding(kind, counted, view, hidden),
    ]


def driver_findings(view: DriverView) -> Iterator[Finding]:
    """Yield findings on the driver's devices: number, unhealthy and busy ones."""
    if view.problem:
        remedy = "install the driver's tool, or mount it and /dev into the container"
        yield warning("devices.driver", view.problem, remedy)
        return
    names = ", ".join(dict.fromkeys(each.name for each in view.devices)) or "no device"
    value = f"{len(view.devices)} x {names}, driver {view.version}"
    remedy = f"{view.tool} lists none: look at the driver's log"
    yield judge(bool(view.devices), "devices.driver", value, remedy, Status.ERROR)
    sick = [f"{each.index}: {each.health}" for each in view.devices if each.health not in HEALTHY]
    if sick:
        remedy = "reset or replace the device, and exclude this host until then"
        yield error("devices.health", ", ".join(sick), remedy)
    busy = [
        f"{each.index}: {each.used_mib} of {each.memory_mib} MiB"
        for each in view.devices
        if each.used_mib > max(BUSY_MIB, each.memory_mib // 10)
    ]
    if busy:
        remedy = "end the processes that hold them, unless they are a run of yours"
        yield warning("devices.memory", f"in use on {', '.join(busy)}", remedy)


def count_finding(kind: DeviceKind, counted: int, view: DriverView, hidden: str | None) -> Finding:
    """Check that torch sees as many devices as the driver lists and the variable leaves visible.

    counted: devices by torch; hidden: value of the visibility variable, None = not set
    """
    variable = device.visible_devices_variable(kind)
    wanted, shown = len(view.devices), f"torch sees {counted}"
    if hidden is not None:
        shown += f" ({variable}={hidden})"
        wanted = min(wanted, sum(bool(word.strip()) for word in hidden.split(",")))
    if counted == 0:
        return error("devices.torch", shown, f"look at driver and installation, and at {variable}")
    if not view.problem and counted != wanted:
        remedy = f"driver, /dev of the container and {variable} have to name the same"
        return error("devices.torch", f"{shown}, the driver offers {wanted}", remedy)
    return ok("devices.torch", shown)


def check_install(kind: DeviceKind, several_hosts: bool) -> list[Finding]:
    """Check driver, CANN, Python and links of an NPU host (docs/npu.md); [] on another kind."""
    if device.resolve_kind(kind) is not DeviceKind.NPU:
        return []
    return list(map(_as_finding, npu_versions.check_host(Host(), several_hosts)))


def _as_finding(found: Checked) -> Finding:
    bad = Status.ERROR if found.fatal else Status.WARNING
    return judge(found.fine, found.name, found.value, found.remedy, bad)


def check_limits(folder: Path = FOLDER) -> list[Finding]:
    """Check the limits of open files, processes and processors, also the container's."""
    soft, hard = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
    raise_it = f"`ulimit -n {OPEN_FILES}` before `ray start` and before the run, on every host"
    if hard < OPEN_FILES:
        raise_it += f"; the hard limit is {hard:.0f}: raise it in limits.conf, or in the container"
    own = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    most, used = read_amount(Amount.PIDS_LIMIT, folder), read_amount(Amount.PIDS_USED, folder)
    used = 0 if used == math.inf else used
    usable, existing = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = read_processors(folder)
    processors = f"{usable} usable" + (f" of {existing}" if usable < existing else "")
    if quota < usable:
        processors += f", held to {quota:g} by the container"
    return [
        judge(
            soft >= OPEN_FILES,
            "limits.open_files",
            f"{_format_limit(soft)}, {OPEN_FILES} are wanted",
            raise_it,
        ),
        judge(
            own >= PROCESSES,
            "limits.processes",
            f"{_format_limit(own)} processes and threads, {PROCESSES} are wanted",
            f"`ulimit -u {PROCESSES}`, or more in limits.conf",
        ),
        judge(
            most - used >= PROCESSES,
            "limits.container_pids",
            f"{used:.0f} in use of {_format_limit(most)}",
            f"start it with --pids-limit {2 * PROCESSES}",
        ),
        judge(
            min(quota, usable) >= 2,
            "limits.processors",
            processors,
            "give it two or more: workers wait for one",
        ),
    ]


def _limit(number: int) -> float:
    return math.inf if number == resource.RLIM_INFINITY else number


def _format_limit(limit: float) -> str:
    return "unlimited" if limit == math.inf else f"{limit:.0f}"


def check_memory(total: int | None = None, available: int | None = None) -> Finding:
    """Check the available memory: an error under LEAST_BYTES, a warning under a tenth of `total`.

    total, available: bytes, None = measure; a container's limit counts if it is the lower one
    """
    total = device.host_memory() if total is None else total
    if available is None:
        limit, used = read_amount(Amount.MEMORY_LIMIT), read_memory_used()
        left = math.inf if used == math.inf else max(limit - used, 0)
        available = int(min(psutil.virtual_memory().available, left))
    return judge(
        available >= max(total // 10, LEAST_BYTES),
        "memory.host",
        f"{format_bytes(available)} of {format_bytes(total)} available",
        "Ray kills workers at 95% use: end other processes, or raise the container's limit",
        Status.ERROR if available < LEAST_BYTES else Status.WARNING,
    )


def shared_memory(wanted: int, free: int | None = None) -> Finding:
    """Warn if /dev/shm has less free space than Ray's object store takes; else return `ok`.

    wanted: bytes of the store; free: bytes, None = measure
    """
    free = shutil.disk_usage("/dev/shm").free if free is None else free
    sizes = f"{format_bytes(free)} free in /dev/shm, Ray's object store takes"
    return judge(
        free >= wanted,
        "memory.shared",
        f"{sizes} {format_bytes(wanted)}",
        "give the container --shm-size=16g, or remount /dev/shm larger; Ray uses /tmp else",
    )


def check_disk(output_dir: Path, wanted: int = LITTLE_FREE) -> Iterator[Finding]:
    """Check rights and free space of the run directory and of Ray's folder for spilled objects."""
    folder = existing_folder(output_dir.absolute())
    free = shutil.disk_usage(folder).free
    remedy = "free some space, or set training.output_dir to another disk"
    value = f"{format_bytes(free)} free in {folder}, {format_bytes(wanted)} are wanted"
    yield judge(free >= wanted, "disk.free", value, remedy)
    if not os.access(folder, os.W_OK | os.X_OK):
        remedy = "set training.output_dir to a folder that can be written"
        yield error("disk.write", f"{folder} cannot be written", remedy)
    check = "disk.ray_folder"
    folder = existing_folder(Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()))
    if not os.access(folder, os.W_OK | os.X_OK):
        yield error(check, f"{folder} cannot be written", "set RAY_TMPDIR to another")
        return
    usage = shutil.disk_usage(folder)
    in_use = usage.used / max(usage.used + usage.free, 1)
    yield judge(
        in_use < RAY_FULL and usage.free >= GIB,
        check,
        f"{format_bytes(usage.free)} free in {folder}, {in_use:.0%} in use",
        "Ray stops spilling objects at 95%: free some space, or set RAY_TMPDIR",
    )


def check_network(several_hosts: bool) -> Iterator[Finding]:
    existing = {name: state.isup for name, state in psutil.net_if_stats().items()}
    return interface_findings(existing, os.environ, several_hosts)


def interface_findings(
    existing: Mapping[str, bool], environment: Mapping[str, str], several_hosts: bool
) -> Iterator[Finding]:
    """Yield a finding per variable that names network interfaces: an error if it selects none.

    Interfaces that are down do not count, nor does loopback if there are several hosts.
    existing: interface -> whether it is up
    """
    usable = [
        name
        for name, is_up in existing.items()
        if is_up and not (several_hosts and name.startswith("lo"))
    ]
    for variable in (*EXACT, *BY_PREFIX):
        value = environment.get(variable)
        if value is None:
            continue
        words = tuple(word.partition(":")[0] for word in value.lstrip("^=").split(",") if word)
        if variable in EXACT or value.lstrip("^").startswith("="):
            named = [name for name in usable if name in words]
        else:
            named = [name for name in usable if name.startswith(words)]
        if value.startswith("^"):
            named = [name for name in usable if name not in named]
        where = "reaches other hosts" if several_hosts else "is up"
        yield judge(
            bool(named),
            f"network.{variable.lower()}",
            f"{variable}={value}" + ("" if named else f" names no interface that {where}"),
            f"use one of {', '.join(usable)}, on this host",
            Status.ERROR,
        )


def file_findings(paths: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """Yield a finding on missing input files, and one on unreadable files if there are any."""
    files = {(key, path): glob.glob(path) for key, path in paths}
    missing = [f"{key}={path}" for (key, path), found in files.items() if not found]
    closed = [
        f"{k}={f}" for (k, _), found in files.items() for f in found if not os.access(f, os.R_OK)
    ]
    if paths:
        there = f"{len(paths)} paths of the configuration"
        value = f"missing: {', '.join(missing)}" if missing else there
        remedy = "correct the path, or copy or mount it on this host"
        yield judge(not missing, "files.there", value, remedy, Status.ERROR)
    if closed:
        remedy = "give this user the right to read it"
        yield error("files.readable", f"no right to read {', '.join(closed)}", remedy)
