"""Check limits of this host: files, processes, memory, shared memory, processors, locale, clock."""

from __future__ import annotations

import locale
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from mindspeed_rlxf import device
from mindspeed_rlxf.device.control_group import (
    FOLDER,
    Amount,
    read_amount,
    read_memory_used,
    read_processors,
)
from mindspeed_rlxf.ops.doctor.findings import Finding, Status, judge
from mindspeed_rlxf.ops.sizes import GIB, format_bytes

OPEN_FILES = 32768  # asked for by the guides of MindSpeed; Ray opens some for each worker
PROCESSES = 4096
LEAST_BYTES = 2 * GIB  # with less, not even a small run with its Ray processes fits
RELEASED = 1_767_225_600  # seconds, 2026-01-01: no clock of a run is before it


def open_files(limits: tuple[int, int] | None = None) -> Finding:
    """Warn if this process may open fewer than OPEN_FILES files (the soft limit); else `ok`.

    limits: (soft, hard), -1 = unlimited; None = those of this process
    The remedy names the hard limit if that is too low as well.
    """
    soft, hard = map(_limit, limits or resource.getrlimit(resource.RLIMIT_NOFILE))
    remedy = f"`ulimit -n {OPEN_FILES}` before `ray start` and before the run, on every host"
    if hard < OPEN_FILES:
        remedy += f"; the hard limit is {hard:.0f}: raise it in limits.conf, or in the container"
    return judge(
        soft >= OPEN_FILES,
        "limits.open_files",
        f"{_format_limit(soft)}, {OPEN_FILES} are wanted",
        remedy,
    )


def processes() -> Finding:
    """Warn if the soft limit of this user's processes and threads is under PROCESSES; else `ok`."""
    soft = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    return judge(
        soft >= PROCESSES,
        "limits.processes",
        f"{_format_limit(soft)} processes and threads, {PROCESSES} are wanted",
        f"`ulimit -u {PROCESSES}`, or more in limits.conf",
    )


def _limit(number: int) -> float:
    return math.inf if number == resource.RLIM_INFINITY else number


def _format_limit(limit: float) -> str:
    return "unlimited" if limit == math.inf else f"{limit:.0f}"


def pids(folder: Path = FOLDER) -> Finding:
    """Warn if the container's control group allows fewer than PROCESSES more processes.

    Else `ok`, also if the group has no limit or the limit cannot be read.
    """
    limit, used = read_amount(Amount.PIDS_LIMIT, folder), read_amount(Amount.PIDS_USED, folder)
    used = 0 if used == math.inf else used
    return judge(
        limit - used >= PROCESSES,
        "limits.container_pids",
        f"{used:.0f} in use of {_format_limit(limit)}",
        f"start it with --pids-limit {2 * PROCESSES}",
    )


def shared_memory(wanted: int, free: int | None = None) -> Finding:
    """Warn if /dev/shm has less free space than Ray's object store takes; else return `ok`.

    wanted: bytes of the store; free: bytes, None = measure
    """
    if free is None:
        found = os.statvfs("/dev/shm")
        free = found.f_bavail * found.f_frsize
    sizes = f"{format_bytes(free)} free in /dev/shm, Ray's object store takes"
    return judge(
        free >= wanted,
        "memory.shared",
        f"{sizes} {format_bytes(wanted)}",
        "give the container --shm-size=16g, or remount /dev/shm larger; Ray uses /tmp else",
    )


def memory(total: int | None = None, available: int | None = None) -> Finding:
    """Check the available memory: an error under LEAST_BYTES, a warning under a tenth of `total`.

    total, available: bytes, None = measure; a container's limit counts if it is the lower one
    """
    total = device.host_memory() if total is None else total
    if available is None:
        limit, used = read_amount(Amount.MEMORY_LIMIT), read_memory_used()
        left = math.inf if used == math.inf else max(limit - used, 0)
        available = int(min(psutil.virtual_memory().available, left))
    value = f"{format_bytes(available)} of {format_bytes(total)} available"
    if available < LEAST_BYTES:
        return judge(
            False,
            "memory.host",
            value,
            "end other processes, or raise the container's limit",
            Status.ERROR,
        )
    return judge(
        available >= total // 10,
        "memory.host",
        value,
        "Ray kills workers at 95% use: end other processes, or raise the limit",
    )


def processors(folder: Path = FOLDER) -> Finding:
    """Warn if this process may use fewer than two processors, by affinity and container quota."""
    usable, existing = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    value = f"{usable} usable" + (f" of {existing}" if usable < existing else "")
    quota = read_processors(folder)
    if quota < usable:
        value += f", held to {quota:g} by the container"
    return judge(
        min(quota, usable) >= 2,
        "limits.processors",
        value,
        "give it two or more: workers wait for one",
    )


def text_encoding(encoding: str | None = None) -> Finding:
    """Warn if the locale is not UTF-8. encoding: None = that of this process"""
    encoding = encoding or locale.getpreferredencoding(False)
    is_utf8 = encoding.lower().replace("-", "") == "utf8"
    names = f"{encoding}, file names {sys.getfilesystemencoding()}"
    return judge(is_utf8, "host.locale", names, "export LC_ALL=C.UTF-8 on every host")


def clock(now: float | None = None) -> Finding:
    """Return an error if the clock is before RELEASED, else `ok`; either shows the time.

    now: seconds since 1970; None = read the clock
    """
    now = time.time() if now is None else now
    return judge(
        now >= RELEASED,
        "host.clock",
        time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)),
        "set the clock (chrony, ntp): tokens and logs use it",
        Status.ERROR,
    )


def threads() -> Finding:
    """Warn if OMP_NUM_THREADS is set to something else than whole numbers from 1 on; else `ok`.

    OpenMP allows several, joined by commas: one for each level of nested regions.
    """
    found = os.environ.get("OMP_NUM_THREADS", "unset")
    is_list = re.fullmatch(r"\s*0*[1-9][0-9]*\s*(,\s*0*[1-9][0-9]*\s*)*", found, re.ASCII)
    return judge(
        is_list is not None or found == "unset",
        "host.threads",
        f"OMP_NUM_THREADS {found}",
        "set a whole number from 1 on (several: joined by commas), or unset it",
    )


CHECKS: tuple[Callable[[], Finding], ...] = (
    open_files, processes, pids, memory, processors, text_encoding, clock, threads,
)  # fmt: skip
