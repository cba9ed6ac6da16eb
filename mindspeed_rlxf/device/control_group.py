"""Limits set by the container's control group, version 2 or 1 (kernel: admin-guide/cgroup-v1).

Older Ascend cluster hosts still use version 1. A container sees its own group at FOLDER.
"""

import math
from enum import Enum
from pathlib import Path

FOLDER = Path("/sys/fs/cgroup")
NO_LIMIT = 2**60  # version 1 writes the largest number of pages for it, in bytes


class Amount(Enum):
    """Control group values: version 2's file name, then version 1's."""

    MEMORY_LIMIT = "memory.max", "memory/memory.limit_in_bytes"
    PIDS_LIMIT = "pids.max", "pids/pids.max"
    PIDS_USED = "pids.current", "pids/pids.current"


def read_amount(amount: Amount, folder: Path = FOLDER) -> float:
    """Return a control group value; infinity if unlimited or unreadable."""
    for name in amount.value:
        try:
            number = int((folder / name).read_text(encoding="ascii"))
            return number if number < NO_LIMIT else math.inf
        except (OSError, ValueError):  # the other version, or `max`
            continue
    return math.inf
