"""Host checks; each cluster host runs the same."""

import contextlib
import math
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

from mindspeed_rlxf import device
from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cluster.ray.cluster import object_store_bytes
from mindspeed_rlxf.config import packages
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.device import npu_versions
from mindspeed_rlxf.device.control_group import FOLDER, Amount, read_amount
from mindspeed_rlxf.device.driver import DriverView, list_device_files, query_driver
from mindspeed_rlxf.device.findings import Finding, Status, error, judge, ok, warning
from mindspeed_rlxf.ops.sizes import GIB, existing_folder, format_bytes

BUSY_MIB = 4096  # the driver itself takes up to 3 GiB of an idle device
OPEN_FILES = 32768  # asked for by the guides of MindSpeed; Ray opens some for each worker
PROCESSES = 4096
LITTLE_FREE = 10 * GIB


@dataclass(frozen=True)
class Subject:
    """The device kind and folder to check; picklable, as every cluster host gets it.

    Attributes:
        output_dir: Absolute path to the run directory.
        resource: Ray resource name for one device; None = the kind's default.
    """

    kind: DeviceKind
    output_dir: str
    resource: str | None = None


def choose_subject(config: RunConfig | None, kind: DeviceKind) -> Subject:
    """Choose what to check; without a configuration, `./outputs` as the run directory.

    `kind` replaces the configured kind unless it is `auto`.
    """
    if config is None:
        return Subject(kind, str(Path("outputs").absolute()))
    kind = config.device.kind if kind is DeviceKind.AUTO else kind
    folder = str(RunDirectory.choose(config).path)
    return Subject(kind, folder, config.device.resource_name)


def check_host(subject: Subject) -> list[Finding]:
    """Run all checks on this host; one that raises becomes a warning."""
    kind = device.resolve_kind(subject.kind)
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "versions": partial(check_software, kind),
        "devices": partial(check_devices, kind),
        "limits": check_limits,
        "disk": partial(check_disk, Path(subject.output_dir)),
    }
    if kind is DeviceKind.NPU:
        host = npu_versions.Host()
        checks["npu.driver"] = partial(npu_versions.check_driver, host)
        checks["npu.cann"] = partial(npu_versions.check_cann, host)
        checks["npu.python"] = lambda: npu_versions.check_python(npu_versions.read_versions())
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check()
        except Exception as problem:
            cause = f"the check itself failed ({describe(problem)})"
            findings.append(warning(name, cause, "check it by hand"))
    return findings


def describe(problem: BaseException) -> str:
    """Format an exception's type and message on one line, truncated to 300 characters."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"


def check_software(kind: DeviceKind) -> Iterator[Finding]:
    """Check package versions; on NPU also CANN and the pairing.

    A missing package is an error if this package depends on it; an NPU also needs torch's adapter.
    """
    yield ok("versions.python", f"{platform.python_version()}, {sys.executable}")
    is_npu = kind is DeviceKind.NPU
    requirements = {}
    with contextlib.suppress(PackageNotFoundError):  # run from its sources
        for line in requires("mindspeed-rlxf") or []:
            requirement = Requirement(line)
            if not requirement.marker or requirement.marker.evaluate():
                requirements[requirement.name] = requirement
    for name in npu_versions.PACKAGES:
        check = f"versions.{name}"
        version = packages.version(name)
        needed = requirements.get(name)
        remedy = f"pip install '{needed or name}' (tested sets: constraints/)"
        if version is None:
            if needed or (is_npu and name == npu_versions.TORCH_NPU):
                yield error(check, "not installed", remedy)
        elif needed and not needed.specifier.contains(version, prereleases=True):
            yield warning(check, f"{version}, outside of {needed.specifier}", remedy)
        else:
            yield ok(check, version)
    if is_npu:
        cann = npu_versions.cann_version()
        remedy = "install CANN, and source its set_env.sh"
        yield judge(bool(cann), "versions.cann", cann or "no CANN found", remedy, Status.ERROR)
        sources = []
        for module in ("megatron.core", "megatron.training", "mindspeed"):
            folder = packages.folder_of(module)
            if folder is not None:
                sources.append(f"{module} from {folder}")
        yield ok("versions.sources", ", ".join(sources))
        yield from npu_versions.find_problems()


def check_devices(kind: DeviceKind) -> Iterator[Finding]:
    """Compare what the driver's tool and torch say about this host's accelerators."""
    try:
        num_by_torch = device.count_by_torch(kind)
    except Exception as problem:
        remedy = "repair the installation, or set device.kind=cpu"
        yield error("devices.torch", describe(problem), remedy)
        return
    view = query_driver(kind)
    if num_by_torch is None or view is None:  # a CPU
        unused = list_device_files()
        value = f"cpu, though there are {', '.join(unused)}" if unused else "cpu, no accelerator"
        remedy = "install the build of torch (and its plug-in) for these devices"
        yield judge(not unused, "devices.kind", value, remedy)
        return
    yield ok("devices.kind", kind.value)
    yield from driver_findings(view)
    variable = device.facts(kind).visible_devices or ""
    num_by_driver = len(view.devices)
    value = f"torch sees {num_by_torch}"
    visible = os.environ.get(variable)
    if visible is not None:
        value += f" ({variable}={visible})"
        num_visible = sum(bool(word.strip()) for word in visible.split(","))
        num_by_driver = min(num_by_driver, num_visible)
    fine = num_by_torch > 0
    if not view.problem and num_by_torch != num_by_driver:
        fine = False
    if not fine and not view.problem:
        value += f", the driver offers {num_by_driver}"
    remedy = f"look at the installation; driver, /dev of the container and {variable} must agree"
    yield judge(fine, "devices.torch", value, remedy, Status.ERROR)


def driver_findings(view: DriverView) -> Iterator[Finding]:
    """Count the driver's devices, and name unhealthy and busy ones."""
    if view.problem:
        remedy = "install the driver's tool, or mount it and /dev into the container"
        yield warning("devices.driver", view.problem, remedy)
        return
    names = ", ".join(dict.fromkeys(chip.name for chip in view.devices)) or "no device"
    value = f"{len(view.devices)} x {names}, driver {view.version}"
    remedy = f"{view.tool} lists none: look at the driver's log"
    yield judge(bool(view.devices), "devices.driver", value, remedy, Status.ERROR)
    unhealthy = []
    busy = []
    for chip in view.devices:
        if chip.health not in ("OK", ""):
            unhealthy.append(f"{chip.index}: {chip.health}")
        if chip.used_mib > max(BUSY_MIB, chip.memory_mib // 10):
            busy.append(f"{chip.index}: {chip.used_mib} of {chip.memory_mib} MiB")
    if unhealthy:
        remedy = "reset or replace the device, and exclude this host until then"
        yield error("devices.health", ", ".join(unhealthy), remedy)
    if busy:
        remedy = "end the processes that hold them, unless they are a run of yours"
        yield warning("devices.memory", f"in use on {', '.join(busy)}", remedy)


def check_limits(folder: Path = FOLDER) -> Iterator[Finding]:
    """Check limits on open files and processes, also the container's."""
    open_files, open_files_hard = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
    remedy = (
        f"`ulimit -n {OPEN_FILES}` before `ray start` and before the run; the hard limit, now "
        f"{_format_limit(open_files_hard)}, is set in limits.conf or for the container"
    )
    value = f"{_format_limit(open_files)}, {OPEN_FILES} are wanted"
    yield judge(open_files >= OPEN_FILES, "limits.open_files", value, remedy)
    num_used = read_amount(Amount.PIDS_USED, folder)
    if num_used == math.inf:  # unknown
        num_used = 0
    num_free = read_amount(Amount.PIDS_LIMIT, folder) - num_used
    user_limit = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    num_free = min(num_free, user_limit)
    value = f"{_format_limit(num_free)} processes and threads, {PROCESSES} are wanted"
    remedy = f"`ulimit -u {PROCESSES}`; start a container with --pids-limit {2 * PROCESSES}"
    yield judge(num_free >= PROCESSES, "limits.processes", value, remedy)


def _limit(value: int) -> float:
    return math.inf if value == resource.RLIM_INFINITY else value


def _format_limit(limit: float) -> str:
    return f"{limit:.0f}".replace("inf", "unlimited")


def check_disk(output_dir: Path) -> Iterator[Finding]:
    """Check permissions and free space for the run directory and Ray's objects."""
    move = "free some space, or set {} to another disk"
    remedy = move.format("training.output_dir")
    yield from _check_folder("disk.free", output_dir.absolute(), LITTLE_FREE, remedy)
    ray_folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    ray_stops_at = shutil.disk_usage(existing_folder(ray_folder)).total // 20  # 95% full
    remedy = move.format("RAY_TMPDIR")
    yield from _check_folder("disk.ray_folder", ray_folder, max(ray_stops_at, GIB), remedy)
    remedy = "give the container --shm-size=16g, or remount /dev/shm larger; Ray uses /tmp else"
    yield from _check_folder("memory.shared", Path("/dev/shm"), object_store_bytes(), remedy)


def _check_folder(check: str, path: Path, needed: int, remedy: str) -> Iterator[Finding]:
    """Check a folder, or its nearest existing parent, for `needed` bytes and write permission."""
    folder = existing_folder(path)
    free = shutil.disk_usage(folder).free
    value = f"{format_bytes(free)} free in {folder}, {format_bytes(needed)} are wanted"
    yield judge(free >= needed, check, value, remedy)
    if not os.access(folder, os.W_OK | os.X_OK):
        yield error(check, f"{folder} cannot be written", remedy)
