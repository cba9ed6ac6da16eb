"""Ends what a killed driver leaves behind: `python -S orphan_guard.py TEMP_DIR PID ...`.

Standard input is a pipe from the driver: it closes when the driver ends, whatever ended it. Ray's
own processes notice too, but two of its agents take a minute over it.
"""

import os
import shutil
import signal
import sys
import time

GRACE_S = 5.0  # for the workers, which end by themselves


def start_time(pid: int) -> str:
    """Tells a process from a later one with the same pid; empty when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def main(temp_dir: str, pids: list[int]) -> None:
    born = {pid: start_time(pid) for pid in pids}
    sys.stdin.buffer.read()
    for pid, moment in born.items():
        if moment and start_time(pid) == moment:
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + GRACE_S
    while os.path.isdir(temp_dir) and time.monotonic() < deadline:
        shutil.rmtree(temp_dir, ignore_errors=True)
        time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1], [int(pid) for pid in sys.argv[2:]])
