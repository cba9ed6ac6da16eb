"""Host checks; each cluster host runs the same."""

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
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            found += check()
        except Exception as problem:
            cause = f"the check itself failed ({describe(problem)})"
            found.append(warning(name, cause, "check it by hand"))
    return found


def describe(problem: BaseException) -> str:
    """Format an exception's type and message on one line, truncated to 300 characters."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"


def check_software(kind: DeviceKind) -> Iterator[Finding]:
    """Check package versions; on NPU also CANN and the pairing.

    A missing package is an error if this package depends on it; an NPU also needs torch's adapter.
    """
    yield ok("versions.python", f"{platform.python_version()}, {sys.executable}")
    is_npu = kind is DeviceKind.NPU
    try:
        parsed = [Requirement(line) for line in requires("mindspeed-rlxf") or []]
    except PackageNotFoundError:  # run from its sources
        parsed = []
    wanted = {each.name: each for each in parsed if not each.marker or each.marker.evaluate()}
    for name in npu_versions.PACKAGES:
        check, version = f"versions.{name}", packages.version(name)
        requirement = wanted.get(name)
        remedy = f"pip install '{requirement or name}' (tested sets: constraints/)"
        if version is None:
            if requirement or (is_npu and name == npu_versions.TORCH_NPU):
                yield error(check, "not installed", remedy)
        elif requirement and not requirement.specifier.contains(version, prereleases=True):
            yield warning(check, f"{version}, outside of {requirement.specifier}", remedy)
        else:
            yield ok(check, version)
    if is_npu:
        cann, remedy = npu_versions.cann_version(), "install CANN, and source its set_env.sh"
        yield judge(bool(cann), "versions.cann", cann or "no CANN found", remedy, Status.ERROR)
        modules = ("megatron.core", "megatron.training", "mindspeed")
        folders = {module: packages.folder_of(module) for module in modules}
        yield ok("versions.sources", ", ".join(f"{m} from {f}" for m, f in folders.items() if f))
        yield from npu_versions.find_problems()


def check_devices(kind: DeviceKind) -> Iterator[Finding]:
    """Compare what the driver's tool and torch say about this host's accelerators."""
    try:
        counted = device.count_by_torch(kind)
    except Exception as problem:
        remedy = "repair the installation, or set device.kind=cpu"
        yield error("devices.torch", describe(problem), remedy)
        return
    view = query_driver(kind)
    if counted is None or view is None:  # a CPU
        unused = list_device_files()
        value = f"cpu, though there are {', '.join(unused)}" if unused else "cpu, no accelerator"
        remedy = "install the build of torch (and its plug-in) for these devices"
        yield judge(not unused, "devices.kind", value, remedy)
        return
    yield ok("devices.kind", kind.value)
    yield from driver_findings(view)
    variable = device.facts(kind).visible_devices or ""
    wanted, shown = len(view.devices), f"torch sees {counted}"
    if (visible := os.environ.get(variable)) is not None:
        shown += f" ({variable}={visible})"
        wanted = min(wanted, sum(bool(word.strip()) for word in visible.split(",")))
    fine = counted > 0 and (bool(view.problem) or counted == wanted)
    shown += "" if fine or view.problem else f", the driver offers {wanted}"
    remedy = f"look at the installation; driver, /dev of the container and {variable} must agree"
    yield judge(fine, "devices.torch", shown, remedy, Status.ERROR)


def driver_findings(view: DriverView) -> Iterator[Finding]:
    """Count the driver's devices, and name unhealthy and busy ones."""
    if view.problem:
        remedy = "install the driver's tool, or mount it and /dev into the container"
        yield warning("devices.driver", view.problem, remedy)
        return
    names = ", ".join(dict.fromkeys(each.name for each in view.devices)) or "no device"
    value = f"{len(view.devices)} x {names}, driver {view.version}"
    remedy = f"{view.tool} lists none: look at the driver's log"
    yield judge(bool(view.devices), "devices.driver", value, remedy, Status.ERROR)
    sick = [
        f"{each.index}: {each.health}" for each in view.devices if each.health not in ("OK", "")
    ]
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


def check_limits(folder: Path = FOLDER) -> Iterator[Finding]:
    """Check limits on open files and processes, also the container's."""
    found = (
        *resource.getrlimit(resource.RLIMIT_NOFILE),
        *resource.getrlimit(resource.RLIMIT_NPROC),
    )
    files, most, own, _ = (math.inf if n == resource.RLIM_INFINITY else n for n in found)
    remedy = (
        f"`ulimit -n {OPEN_FILES}` before `ray start` and before the run; the hard limit, now "
        f"{_shown(most)}, is set in limits.conf or for the container"
    )
    value = f"{_shown(files)}, {OPEN_FILES} are wanted"
    yield judge(files >= OPEN_FILES, "limits.open_files", value, remedy)
    used = read_amount(Amount.PIDS_USED, folder)
    allowed = read_amount(Amount.PIDS_LIMIT, folder)
    left = min(allowed - (used if used < math.inf else 0), own)
    value = f"{_shown(left)} processes and threads, {PROCESSES} are wanted"
    remedy = f"`ulimit -u {PROCESSES}`; start a container with --pids-limit {2 * PROCESSES}"
    yield judge(left >= PROCESSES, "limits.processes", value, remedy)


def _shown(limit: float) -> str:
    return f"{limit:.0f}".replace("inf", "unlimited")


def check_disk(output_dir: Path) -> Iterator[Finding]:
    """Check permissions and free space for the run directory and Ray's objects."""
    spilled = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    ray_stops = shutil.disk_usage(existing_folder(spilled)).total // 20  # at 95% full
    moves = "free some space, or set {} to another disk"
    shared = "give the container --shm-size=16g, or remount /dev/shm larger; Ray uses /tmp else"
    for check, path, wanted, remedy in (
        ("disk.free", output_dir.absolute(), LITTLE_FREE, moves.format("training.output_dir")),
        ("disk.ray_folder", spilled, max(ray_stops, GIB), moves.format("RAY_TMPDIR")),
        ("memory.shared", Path("/dev/shm"), object_store_bytes(), shared),
    ):
        folder = existing_folder(path)
        free = shutil.disk_usage(folder).free
        value = f"{format_bytes(free)} free in {folder}, {format_bytes(wanted)} are wanted"
        yield judge(free >= wanted, check, value, remedy)
        if not os.access(folder, os.W_OK | os.X_OK):
            yield error(check, f"{folder} cannot be written", remedy)
