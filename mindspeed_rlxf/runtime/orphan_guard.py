"""Ends what a killed driver leaves behind: `python -S orphan_guard.py TEMP_DIR PID ...`.

Standard input is a pipe from the driver: it closes when the driver ends, whatever ended it. Ray's
own processes notice too, but two of its agents take a minute over it. Those that started after the
guard are known by the name of the cluster's own TEMP_DIR in their command line or environment.
"""

import contextlib
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
            end(pid)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        later = processes_of(temp_dir)
        for pid in later:
            end(pid)
        shutil.rmtree(temp_dir, ignore_errors=True)
        if not later and not os.path.isdir(temp_dir):
            return
        time.sleep(0.2)


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def processes_of(temp_dir: str) -> list[int]:
    """Every process but this one that names the folder; mkdtemp made it, so no other run does."""
    word, mine = os.fsencode(temp_dir), os.getpid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if pid != mine and mentions(pid, word)]


def mentions(pid: int, word: bytes) -> bool:
    for name in ("cmdline", "environ"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                if word in file.read():
                    return True
        except OSError:  # ended meanwhile, or another user's
            continue
    return False


if __name__ == "__main__":
    main(sys.argv[1], [int(pid) for pid in sys.argv[2:]])
