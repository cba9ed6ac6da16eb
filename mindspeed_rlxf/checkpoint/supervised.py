"""Messages between a training process and its supervisor: a facts file, exit codes.

Has no heavy imports, to keep the supervisor small.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_rlxf.weights.atomic import replace_file

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_STOPPED = 75
CHILD_OF = "RLXF_SUPERVISOR"  # "PID:TIME:FILE": the supervisor, when the command was given, facts


def report_facts(**facts: Any) -> None:
    """Add facts to the supervisor's JSON file, if there is a supervisor."""
    supervision = read_supervision()
    if supervision is not None:
        file = Path(supervision[1])
        write_facts(file, {**read_facts(file), **facts})


def find_command_start() -> float | None:
    """Return the command's start by `time.monotonic`; None without a supervisor."""
    supervision = read_supervision()
    return float(supervision[2]) if supervision else None


def read_supervision() -> tuple[int, str, str] | None:
    """Read CHILD_OF: (supervisor's pid, facts file, command start).

    None if it is unset, or the pid is not this process's parent.
    """
    pid, _, rest = os.environ.get(CHILD_OF, "").partition(":")
    started, _, file = rest.partition(":")
    if not pid.isdigit() or int(pid) != os.getppid():  # inherited from a process further above
        return None
    return int(pid), file, started


def read_facts(file: Path) -> dict[str, Any]:
    """Return the facts in a JSON file; {} if unreadable."""
    try:
        facts = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def write_facts(file: Path, facts: Mapping[str, Any]) -> None:
    """Replace the facts file."""
    replace_file(file, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
