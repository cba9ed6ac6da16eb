"""Kill processes and remove files left by a killed driver.

Run as `python -S orphan_guard.py TEMP_DIR`. Standard input is a pipe from the driver, which closes
however the driver ends. Ray's own processes notice the driver's end too, but its agents, and
workers just starting, take a minute. The driver starts the guard before Ray. Cluster processes are
found by the TEMP_DIR name: in the command line, the environment, or the path to an open file (a
worker overwrites the first two with its title).
"""

import contextlib
import os
import shutil
import signal
import sys
import time

GRACE_S = 30.0  # longest search for further processes; one search may take seconds on a busy host
QUIET_S = 0.5  # the guard ends when it has seen no process of the cluster for this long


def main(temp_dir: str) -> None:
    """Wait until stdin closes, then kill all processes that mention `temp_dir`, and remove it.

    Repeats until no process and no folder was there for QUIET_S, at most for GRACE_S.
    """
    spared = {os.getpid(), os.getppid()}  # the driver lives when it closes the pipe itself
    word = os.fsencode(temp_dir)  # a random name: no other run mentions it
    sys.stdin.buffer.read()
    last_seen = time.monotonic()  # a process or the folder
    deadline = last_seen + GRACE_S
    while time.monotonic() < min(deadline, last_seen + QUIET_S):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        orphans = [pid for pid in pids if pid not in spared and mentions(pid, word)]
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, another user's
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(temp_dir, ignore_errors=True)
        if orphans or os.path.isdir(temp_dir):
            last_seen = time.monotonic()
        time.sleep(0.2)


def mentions(pid: int, word: bytes) -> bool:
    """Return whether a process's command line, environment, or open file paths contain the word."""
    folder = f"/proc/{pid}"
    with contextlib.suppress(OSError):  # ended meanwhile, or another user's
        for name in ("cmdline", "environ"):
            with open(f"{folder}/{name}", "rb") as file:
                if word in file.read():
                    return True
        for name in os.listdir(f"{folder}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if word in os.fsencode(os.readlink(f"{folder}/fd/{name}")):
                    return True
    return False


if __name__ == "__main__":
    main(sys.argv[1])
