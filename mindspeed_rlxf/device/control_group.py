"""What the container's control group allows, of version 2 or 1 (kernel: admin-guide/cgroup-v1).

Older host systems of Ascend clusters still use version 1. A container sees its own group at FOLDER.
"""

import math
from enum import Enum
from pathlib import Path

FOLDER = Path("/sys/fs/cgroup")
NO_LIMIT = 2**60  # version 1 writes the largest number of pages for it, in bytes


class Amount(Enum):
    """Numbers of a control group, as the file of version 2 and that of version 1."""

    MEMORY_LIMIT = "memory.max", "memory/memory.limit_in_bytes"
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
