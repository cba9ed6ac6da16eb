"""End the processes and files that a killed driver leaves: `python -S orphan_guard.py TEMP_DIR`.

Standard input is a pipe from the driver, which closes however the driver ends. Ray's own processes
notice that too, but its agents, and workers that were just starting, take a minute. The driver
starts the guard before Ray, and writes a line with the pids of Ray's processes once they run. The
others are found by the name of the cluster's own TEMP_DIR: in their command line, their
environment, or a file that they have open (a worker writes its title over the first two).
"""

import contextlib
import os
import shutil
import signal
import sys
import time

GRACE_S = 5.0  # for the workers, which end by themselves
QUIET_S = 0.5  # without a process of the cluster, until there is none on its way either


def start_time(pid: int) -> str:
    """Return the start time, which tells a process from a later one of its pid; empty = none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def main(temp_dir: str) -> None:
    """Wait until stdin closes, then end the cluster's processes and remove `temp_dir`.

    These are the pids on the first line of stdin, and all that mention `temp_dir`.
    """
    spared = {os.getpid(), os.getppid()}  # the driver lives when it closes the pipe itself
    pids = [int(word) for word in sys.stdin.buffer.readline().split()]
    born = {pid: start_time(pid) for pid in pids}
    sys.stdin.buffer.read()
    for pid, moment in born.items():
        if moment and start_time(pid) == moment:
            end(pid)
    last = time.monotonic()  # that one was seen
    deadline = last + GRACE_S
    while time.monotonic() < min(deadline, last + QUIET_S):
        later = processes_of(temp_dir, spared)
        for pid in later:
            end(pid)
        shutil.rmtree(temp_dir, ignore_errors=True)
        if later or os.path.isdir(temp_dir):
            last = time.monotonic()
        time.sleep(0.2)


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def processes_of(temp_dir: str, spared: set[int]) -> list[int]:
    """Find the other processes that name the folder; its name is random, so no other run has it."""
    word = os.fsencode(temp_dir)
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if pid not in spared and mentions(pid, word)]


def mentions(pid: int, word: bytes) -> bool:
    """Whether a process has the word in its command line, environment, or paths of open files."""
    for name in ("cmdline", "environ"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                if word in file.read():
                    return True
        except OSError:  # ended meanwhile, or another user's
            continue
    return any(word in target for target in open_files(pid))


def open_files(pid: int) -> list[bytes]:
    """List the paths of a process's open files."""
    folder, found = f"/proc/{pid}/fd", []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found.append(os.fsencode(os.readlink(f"{folder}/{name}")))
    return found


if __name__ == "__main__":
    main(sys.argv[1])
