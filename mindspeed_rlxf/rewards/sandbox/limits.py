"""Limits of a program, and those of them that the kernel keeps for each process (setrlimit(2))."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

MIB = 1 << 20
INTERPRETER_MIB = 128
"""Address space that Python has mapped before a program starts."""


@dataclass(frozen=True)
class Limits:
    """cpu_s, wall_s: seconds of all processes together; memory_mb: of all processes together;
    file_mb: one file, and all files together; files: open ones of a process, and a hundred times
    as many that exist; processes: threads included; output_kb: what is printed
    """

    cpu_s: float
    wall_s: float
    memory_mb: int
    file_mb: int
    files: int
    processes: int
    output_kb: int


def limit_this_process(limits: Limits) -> None:
    """Set what each process of the program is held to, all but the number of processes."""
    seconds = max(1, round(limits.cpu_s + 0.5))
    space = (limits.memory_mb + INTERPRETER_MIB) * MIB
    _lower(resource.RLIMIT_CPU, seconds, seconds + 1)
    _lower(resource.RLIMIT_AS, space, space)
    _lower(resource.RLIMIT_FSIZE, limits.file_mb * MIB, limits.file_mb * MIB)
    _lower(resource.RLIMIT_NOFILE, limits.files, limits.files)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        _lower(kind, 0, 0)


def limit_processes(count: int) -> None:
    """Set the largest number of processes of this user id, which must belong to this run only."""
    _lower(resource.RLIMIT_NPROC, count, count)


def counts_by_namespace() -> bool:
    """Whether a user namespace has its own count of a user's processes (Linux 5.14, ucounts)."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


def _lower(kind: int, soft: int, hard: int) -> None:
    """Lower a limit; one that is lower already stays."""
    _, before = resource.getrlimit(kind)
    if before != resource.RLIM_INFINITY:
        soft, hard = min(soft, before), min(hard, before)
    resource.setrlimit(kind, (soft, hard))
