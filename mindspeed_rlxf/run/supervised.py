"""Messages between a training process and its supervisor: a file of facts, exit codes.

Imports nothing heavy, so that the supervisor stays small.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_rlxf.files.plain import read_json
from mindspeed_rlxf.files.safe import PRIVATE, replace_file

EXIT_DONE, EXIT_FAILED, EXIT_MISTAKE, EXIT_STOPPED = 0, 1, 2, 75
CHILD_OF = "RLXF_SUPERVISOR"  # pid of the supervisor, file for facts, when the command was given


def report_facts(**facts: Any) -> None:
    """Add facts that the supervisor needs to its file; without a supervisor do nothing."""
    if given := read_supervision():
        file = Path(given[1])
        write_facts(file, {**read_facts(file), **facts})


def find_command_start() -> float | None:
    """Return when the user gave the command, seconds of the epoch; None without a supervisor."""
    given = read_supervision()
    return float(given[2]) if given else None


def read_supervision() -> tuple[int, str, str] | None:
    """Return (pid of the supervisor, file for facts, start of the command); None without one."""
    pid, _, rest = os.environ.get(CHILD_OF, "").partition(":")
    started, _, file = rest.partition(":")
    if not pid.isdigit() or int(pid) != os.getppid():  # inherited from a process further above
        return None
    return int(pid), file, started


def read_facts(file: Path) -> dict[str, Any]:
    """Read the facts of a file; return an empty dict where it cannot be read."""
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_facts(file: Path, facts: Mapping[str, Any]) -> None:
    """Replace the facts of a file."""
    replace_file(file, json.dumps(facts, indent=2, ensure_ascii=False) + "\n", PRIVATE)
