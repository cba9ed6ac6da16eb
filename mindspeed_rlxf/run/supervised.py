"""What a training process and its supervisor tell each other: a file of facts, exit codes.

Imports nothing heavy: the supervisor stays small.
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
    """Add facts that the supervisor needs to those that it has; in the training process."""
    if given := supervision():
        file = Path(given[1])
        write_facts(file, {**read_facts(file), **facts})


def command_started() -> float | None:
    """When the user gave the command, in seconds of the epoch; None without a supervisor."""
    given = supervision()
    return float(given[2]) if given else None


def supervision() -> tuple[int, str, str] | None:
    """(pid of the supervisor, file for facts, start of the command) of this process."""
    pid, _, rest = os.environ.get(CHILD_OF, "").partition(":")
    started, _, file = rest.partition(":")
    if not pid.isdigit() or int(pid) != os.getppid():  # inherited from further above
        return None
    return int(pid), file, started


def read_facts(file: Path) -> dict[str, Any]:
    """The facts of a file; none where it cannot be read."""
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_facts(file: Path, facts: Mapping[str, Any]) -> None:
    """Replace the file."""
    replace_file(file, json.dumps(facts, indent=2, ensure_ascii=False) + "\n", PRIVATE)
