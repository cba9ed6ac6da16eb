"""Limits of this host: files, processes, memory, shared memory, processors, text, clock."""

from __future__ import annotations

import locale
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from mindspeed_rlxf import device
from mindspeed_rlxf.ops.doctor.findings import Finding, error, ok, warning

OPEN_FILES = 32768  # what the guides of MindSpeed ask for; Ray opens some for each worker
PROCESSES = 4096
GIB, MIB = 1024**3, 1024**2
PROCESS_BYTES = 2 * GIB  # under it not even a small run with its Ray processes fits
OLDEST_PYTHON = (3, 10)
CGROUP = Path("/sys/fs/cgroup")
RELEASED = 1_767_225_600  # seconds, 2026-01-01: no clock of a run is before it


def python_finding(version: tuple[int, int, int] | None = None) -> Finding:
    major, minor, micro = version or sys.version_info[:3]
    value = f"{major}.{minor}.{micro}"
    if (major, minor) < OLDEST_PYTHON:
        return error("versions.python", value, "install Python 3.10 or newer")
    return ok("versions.python", f"{value}, {sys.executable}")


def open_files(limits: tuple[int, int] | None = None) -> Finding:
    """limits: soft and hard; -1 = none."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        return ok("limits.open_files", _limit(soft))
    remedy = f"`ulimit -n {OPEN_FILES}` before `ray start` and before the run, on every host"
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        remedy += f"; the hard limit is {hard}: raise it in limits.conf, or in the container"
    return warning("limits.open_files", f"{soft}, {OPEN_FILES} are wanted", remedy)


def processes(limits: tuple[int, int] | None = None) -> Finding:
    soft, _ = limits or resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or soft >= PROCESSES:
        return ok("limits.processes", _limit(soft))
    value = f"{soft} processes and threads, {PROCESSES} are wanted"
    return warning("limits.processes", value, f"`ulimit -u {PROCESSES}`, or more in limits.conf")


def pids(folder: Path = CGROUP) -> Finding:
    """Of the container: threads count, and torch and Ray start many."""
    limit, used = _cgroup_number(folder / "pids.max"), _cgroup_number(folder / "pids.current")
    if limit is None:
        return ok("limits.container_pids", "no limit")
    value = f"{used or 0} of {limit} in use"
    if limit - (used or 0) >= PROCESSES:
        return ok("limits.container_pids", value)
    return warning("limits.container_pids", value, f"start it with --pids-limit {2 * PROCESSES}")


def shared_memory(wanted: int, free: int | None = None) -> Finding:
    """wanted: bytes of Ray's object store, which lives there."""
    if free is None:
        found = os.statvfs("/dev/shm")
        free = found.f_bavail * found.f_frsize
    value = f"{size(free)} free in /dev/shm, Ray's object store takes {size(wanted)}"
    if free >= wanted:
        return ok("memory.shared", value)
    remedy = "give the container --shm-size=16g, or remount /dev/shm larger; Ray uses /tmp else"
    return warning("memory.shared", value, remedy)


def memory(total: int | None = None, available: int | None = None) -> Finding:
    """total: of the container where that is less than the host's."""
    total = device.host_memory() if total is None else total
    left = _cgroup_left()
    if available is None:
        available = int(psutil.virtual_memory().available)
        available = available if left is None else min(available, left)
    value = f"{size(available)} of {size(total)} available"
    if available < PROCESS_BYTES:
        return error("memory.host", value, "end other processes, or raise the container's limit")
    if available < total // 10:
        remedy = "Ray kills workers at 95% use: end other processes, or raise the limit"
        return warning("memory.host", value, remedy)
    return ok("memory.host", value)


def processors(folder: Path = CGROUP) -> Finding:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    value = f"{usable} usable" + (f" of {there}" if usable < there else "")
    quota = _cpu_quota(folder)
    if quota is not None and quota < usable:
        value += f", held to {quota:g} by the container"
    if min(quota or usable, usable) < 2:
        return warning("limits.processors", value, "give it two or more: workers wait for one")
    return ok("limits.processors", value)


def text_encoding(encoding: str | None = None) -> Finding:
    """Our own files are UTF-8 whatever it is; libraries and the console follow the locale."""
    encoding = encoding or locale.getpreferredencoding(False)
    names = f"{encoding}, file names {sys.getfilesystemencoding()}"
    if encoding.lower().replace("-", "") == "utf8":
        return ok("host.locale", names)
    return warning("host.locale", names, "export LC_ALL=C.UTF-8 on every host")


def clock(now: float | None = None) -> Finding:
    now = time.time() if now is None else now
    value = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < RELEASED:
        return error("host.clock", value, "set the clock (chrony, ntp): tokens and logs use it")
    return ok("host.clock", value)


def overcommit(environment: Mapping[str, str] | None = None) -> Finding:
    """Settings of threads: dozens of workers with a pool for each core starve one another."""
    found = (os.environ if environment is None else environment).get("OMP_NUM_THREADS")
    if found is None or (found.isdigit() and int(found) >= 1):
        return ok("host.threads", f"OMP_NUM_THREADS={found}" if found else "OMP_NUM_THREADS unset")
    return warning("host.threads", f"OMP_NUM_THREADS={found!r}", "set a whole number or unset it")


LOOKS: tuple[Callable[[], Finding], ...] = (
    open_files,
    processes,
    pids,
    memory,
    processors,
    text_encoding,
    clock,
    overcommit,
)


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def _cgroup_number(file: Path) -> int | None:
    """None: there is no such file, or it says `max`."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _cgroup_left(folder: Path = CGROUP) -> int | None:
    limit, used = _cgroup_number(folder / "memory.max"), _cgroup_number(folder / "memory.current")
    return None if limit is None or used is None else max(limit - used, 0)


def _cpu_quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None
