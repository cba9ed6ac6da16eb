"""Find ground truths that math-verify cannot parse, before a run starts.

The parser may run without bound, so it runs in a process with a deadline.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence

from mindspeed_rlxf.rewards.expressions import can_parse

logger = logging.getLogger(__name__)

DEADLINE_S = 60.0  # some 10,000 expressions; later ones count as parsed


def find_unparsed(truths: Sequence[str]) -> list[str]:
    """Return those truths of `math` that are no expressions, so that only equal texts match them.

    Starts a process of this module, unless there are no truths.
    """
    if not truths:
        return []
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        printed, _ = process.communicate(json.dumps(list(truths)), DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
    if process.returncode != 0:
        logger.warning(
            "not all %d ground truths of math were parsed before the start: the process ended with "
            "exit code %d (its limit is %g s)", len(truths), process.returncode, DEADLINE_S,
        )  # fmt: skip
    complete_lines = printed.split("\n")[:-1]
    return [truths[int(line)] for line in complete_lines if line]


def main() -> None:
    """Read a JSON list of truths; print the index of each that cannot be parsed, as they come."""
    for index, truth in enumerate(json.load(sys.stdin)):
        if not can_parse(truth):
            print(index, flush=True)
