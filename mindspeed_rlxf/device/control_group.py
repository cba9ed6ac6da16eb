"""What the container's control group allows, of version 2 or 1 (kernel: admin-guide/cgroup-v1).

Older host systems of Ascend clusters still use version 1. A container sees its own group at FOLDER.
"""

from __future__ import annotations

import contextlib
import math
from enum import Enum
from pathlib import Path

FOLDER = Path("/sys/fs/cgroup")
NO_LIMIT = 2**60  # version 1 writes the largest number of pages for it, in bytes


class Amount(Enum):
    """Numbers of a control group, as the file of version 2 and that of version 1."""

    MEMORY_LIMIT = "memory.max", "memory/memory.limit_in_bytes"
    MEMORY_USED = "memory.current", "memory/memory.usage_in_bytes"
    PIDS_LIMIT = "pids.max", "pids/pids.max"
    PIDS_USED = "pids.current", "pids/pids.current"


def read_amount(amount: Amount, folder: Path = FOLDER) -> float:
    """Return a number of the control group; infinity if it has no limit or cannot be read."""
    for name in amount.value:
        try:
            number = int((folder / name).read_text(encoding="ascii"))
            return number if number < NO_LIMIT else math.inf
        except (OSError, ValueError):  # the other version, or `max`
            continue
    return math.inf


def read_memory_used(folder: Path = FOLDER) -> float:
    """Return the bytes of memory in use by the control group; infinity if it cannot be read.

    Without the file cache that the kernel drops first, which the group's number includes.
    """
    cache = 0
    for name, key in (
        ("memory.stat", "inactive_file"),
        ("memory/memory.stat", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):
            lines = (folder / name).read_text(encoding="ascii").splitlines()
            cache = next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)
            break
    return max(read_amount(Amount.MEMORY_USED, folder) - cache, 0)


def read_processors(folder: Path = FOLDER) -> float:
    """Return how many processors the control group allows by its quota of processor time.

    Infinity if it sets no quota or it cannot be read.
    """
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = (
                (folder / "cpu" / f"cpu.cfs_{name}_us").read_text(encoding="ascii")
                for name in ("quota", "period")
            )
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # `max` is no number; version 1 writes -1
        return math.inf
