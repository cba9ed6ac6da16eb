"""Limits of a program, and those that the kernel enforces for each process (setrlimit(2))."""

from __future__ import annotations

import math
import os
import resource
from dataclasses import dataclass

MIB = 1 << 20
INTERPRETER_MIB = 128
"""Address space that Python has mapped before a program starts."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program with all its processes.

    cpu_s:     CPU seconds of all processes together
    wall_s:    seconds until the program is stopped
    memory_mb: MiB of all processes together
    file_mb:   MiB of one file, and of all files together
    files:     open files of a process; a hundred times as many may exist
    processes: processes and threads
    output_kb: KiB printed to standard output
    """

    cpu_s: float
    wall_s: float
    memory_mb: int
    file_mb: int
    files: int
    processes: int
    output_kb: int


def limit_this_process(limits: Limits) -> None:
    """Lower this process's limits of CPU time, address space, file size and open files.

    Each process may use `cpu_s` rounded up to whole seconds, then gets SIGXCPU, and SIGKILL a
    second later. The address space is INTERPRETER_MIB larger than `memory_mb`. A present
    hard limit that is lower stays. Children inherit the limits. Core dumps, locked memory and
    message queues get 0. The number of processes is not limited here.
    """
    seconds = max(1, math.ceil(limits.cpu_s))
    space = (limits.memory_mb + INTERPRETER_MIB) * MIB
    _set_limit(resource.RLIMIT_CPU, seconds, seconds + 1)
    _set_limit(resource.RLIMIT_AS, space, space)
    _set_limit(resource.RLIMIT_FSIZE, limits.file_mb * MIB, limits.file_mb * MIB)
    _set_limit(resource.RLIMIT_NOFILE, limits.files, limits.files)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        _set_limit(kind, 0, 0)


def limit_processes(count: int) -> None:
    """Lower the number of processes that this process's user may have.

    No other run may use that user id, because all its processes count.
    """
    _set_limit(resource.RLIMIT_NPROC, count, count)


def counts_by_namespace() -> bool:
    """Whether the kernel counts a user's processes per user namespace (Linux 5.14 and later)."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


def _set_limit(kind: int, soft: int, hard: int) -> None:
    """Set one limit of this process, soft and hard, each to at most the present hard limit."""
    _, before = resource.getrlimit(kind)
    if before != resource.RLIM_INFINITY:
        soft, hard = min(soft, before), min(hard, before)
    resource.setrlimit(kind, (soft, hard))
