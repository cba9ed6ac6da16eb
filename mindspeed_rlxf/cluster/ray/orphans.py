"""Keep the guard process running that cleans up after a killed driver."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

SCRIPT = Path(__file__).with_name("orphan_guard.py")
END_S = 30.0  # longest wait for the guard to end by itself
RUSH_S = 0.5  # a guard that ends sooner after its start is replaced after this pause


class OrphanGuard:
    """The `orphan_guard` process of our own cluster; a guard that ends too early is replaced."""

    def __init__(self, temp_dir: Path) -> None:
        """Start the guard, and a thread that starts another when it ends.

        temp_dir: the cluster's folder; the guard finds the cluster's processes by its path
        """
        self._temp_dir, self._pids = temp_dir, ""
        self._lock, self._ending = threading.Lock(), False
        self._process = self._start_guard()
        threading.Thread(target=self._restart_when_killed, name="orphan guard", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, pids: Iterable[int]) -> None:
        """Send pids to the guard, which kills these processes when the driver or the cluster ends.

        The guard's own pid is left out. The guard reads only the first line that it gets, so call
        this once.
        """
        with self._lock:
            self._pids = " ".join(str(pid) for pid in pids if pid != self.pid)
            self._send_pids()

    def end(self) -> None:
        """Close the guard's pipe, so that it cleans up; wait for its end, kill it after END_S."""
        with self._lock:
            self._ending = True
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:  # the cluster has ended already
            self._process.kill()
            self._process.wait()

    def _start_guard(self) -> subprocess.Popen[bytes]:
        """Start a guard process in its own session, which signals to the driver do not reach.

        Its stdin is a pipe; what it prints is discarded.
        """
        return subprocess.Popen(
            [sys.executable, "-S", str(SCRIPT), str(self._temp_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _send_pids(self) -> None:
        """Write the line of pids to the guard's pipe; do nothing if the guard has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # killed just now: the next guard gets them
            self._process.stdin.write(f"{self._pids}\n".encode())
            self._process.stdin.flush()

    def _restart_when_killed(self) -> None:
        """Until `end` is called, start a new guard each time the process ends, with a warning.

        The new guard is sent the same pids. After a guard that ended within RUSH_S, wait RUSH_S
        first.
        """
        while True:
            started = time.monotonic()
            status = self._process.wait()
            if time.monotonic() - started < RUSH_S:  # it may fail by itself each time
                time.sleep(RUSH_S)
            with self._lock:
                if self._ending:
                    return
                logger.warning(
                    "the guard process of the Ray cluster ended with status %d; starting another",
                    status,
                )
                self._process = self._start_guard()
                if self._pids:
                    self._send_pids()
