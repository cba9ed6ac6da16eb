"""Run training in a child process, and restart it after failures.

The user's process stays small: it imports no large package, forwards signals, and decides by the
exit code and the training process's files: its facts (`report_facts`), failure.json and the newest
checkpoint's pointer. Training is killed if the supervisor ends. A restart runs the same command,
which resumes.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from mindspeed_rlxf.checkpoint.supervised import (
    CHILD_OF,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_MISTAKE,
    EXIT_STOPPED,
    read_facts,
    read_supervision,
    write_facts,
)
from mindspeed_rlxf.config.problems import quote
from mindspeed_rlxf.trainer.stopping import ignore_hangups, stop_signals

FIRST_PAUSE_S = 5.0  # what the last attempt left is ended meanwhile


class Failure(NamedTuple):
    """A training failure.

    Attributes:
        iteration: Failed iteration; None = unknown.
        cause: Role, phase, error class, errno; None = a mistake found by a restart, which equals no
            other failure.
        saved: Newest checkpoint's iteration; 0 = none.
    """

    iteration: int | None
    cause: tuple[Any, ...] | None
    saved: int


class Restarts:
    """Counts a command's restarts since its newest checkpoint."""

    def __init__(self) -> None:
        self.used = 0  # since the newest checkpoint, or since the first failure
        self._previous: Failure | None = None

    @property
    def pause_s(self) -> float:
        """Seconds before the next restart: 5, 10, 20, ... 300 since the newest checkpoint."""
        return min(FIRST_PAUSE_S * 2.0 ** (self.used - 1), 300.0)

    def decide(self, failure: Failure, allowed: int) -> tuple[bool, str]:
        """Decide whether to restart, and count it.

        Refuses a failure with the previous one's cause and iteration. A newer checkpoint resets the
        count.

        Args:
            failure: The newest failure.
            allowed: `training.max_restarts`; 0 = never.

        Returns:
            Whether to restart, and the reason; "" if restarts are off.
        """
        previous = self._previous
        if previous is not None and failure.saved > previous.saved:
            self.used = 0
        if failure.cause is not None or previous is None:
            self._previous = failure
        if previous is not None and previous.cause is not None and previous[:2] == failure[:2]:
            failed = "it failed twice"
            if failure.iteration is not None:
                failed += f" in iteration {failure.iteration}"
            return False, f"{failed} with the same cause"
        if not allowed:
            return False, ""
        if self.used >= allowed:
            return False, f"training.max_restarts={allowed} are used up since the last checkpoint"
        self.used += 1
        start = f"the checkpoint of iteration {failure.saved}" if failure.saved else "the start"
        return True, f"{self.used} of {allowed} (training.max_restarts), from {start}"


SHUTDOWN_S = 60.0  # beyond the grace, until a training process that does not stop is killed
UNSUPERVISED = (
    "-h", "--help", "--cfg", "-c", "--cfg=job", "-cjob", "dry_run=true", "runtime=local",
    "runtime.kind=local", "training.max_restarts=0",
)  # fmt: skip


def supervise() -> int | None:
    """Run this process's command in a child process, with restarts; return the exit code.

    Returns None if this process must do the work itself: it is the child, a torchrun rank, or its
    arguments (the YAML is not read) ask for one process (runtime=local), no restarts or no training
    (dry_run, --cfg, --help). The kernel kills the child when its parent ends (Linux).
    """
    supervision = read_supervision()
    if supervision:
        # Until training watches signals: an end without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != supervision[0]:  # it has ended already
            os._exit(EXIT_STOPPED)
        return None
    is_plain = any(word.lstrip("+").lower() in UNSUPERVISED for word in sys.argv[1:])
    if "WORLD_SIZE" in os.environ or is_plain:
        return None
    return Supervisor([sys.executable, *sys.orig_argv[1:]]).run()


class Supervisor:
    """Runs one command's attempts until it is done, stopped, or may not restart."""

    def __init__(self, command: Sequence[str]) -> None:
        """Keep the command, to which a restart appends key=value arguments."""
        self._command = list(command)
        self._started = time.monotonic()
        self._signals: list[int] = []  # received, and not forwarded yet
        self._stops = False  # a signal has asked for an end
        self._kill_at = float("inf")
        self._facts: dict[str, Any] = {}
        self._file = Path()  # facts that the training process reports

    def run(self) -> int:
        """Run attempts to the end; return the exit code. Handles `stop_signals` from now on."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        with tempfile.TemporaryDirectory(prefix="rlxf-run-") as folder:
            # systemd-tmpfiles, which empties /tmp, leaves a locked folder alone.
            with contextlib.suppress(OSError):
                fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)
            self._file = Path(folder) / "facts.json"
            return self._run_attempts()

    def _run_attempts(self) -> int:
        """Run attempts until no restart is needed or allowed; return the exit code.

        A mistake found only by a restart counts as one more failure: storage may be away, or
        another process still ending.
        """
        restarts = Restarts()
        changes: list[str] = []
        while True:
            write_facts(self._file, {})
            environment = {**os.environ, CHILD_OF: f"{os.getpid()}:{self._started}:{self._file}"}
            command = [*self._command, *changes]
            code = self._wait_for(subprocess.Popen(command, env=environment))
            reported = read_facts(self._file)
            self._facts |= reported
            if self._stops and code not in (EXIT_DONE, EXIT_FAILED, EXIT_MISTAKE):
                return EXIT_STOPPED
            if code in (EXIT_DONE, EXIT_STOPPED) or (code == EXIT_MISTAKE and not restarts.used):
                return code
            if "no_restart" in reported:
                _say(f"no restart: {reported['no_restart']}")
                return EXIT_FAILED
            failure = self._find_failure(code, reported)
            if failure is None or self._stops:
                return EXIT_FAILED
            allowed, reason = restarts.decide(failure, int(self._facts.get("max_restarts", 0)))
            if reason:
                _say(f"{'restart' if allowed else 'no restart'}: {reason}")
            if not allowed:
                return EXIT_FAILED
            deadline = time.monotonic() + restarts.pause_s
            while not self._stops and time.monotonic() < deadline:
                time.sleep(0.1)
            if self._stops:
                return EXIT_STOPPED
            changes = self._restart_overrides()

    def _restart_overrides(self) -> list[str]:
        """Return overrides that resume the run; on a joined cluster it waits for good nodes."""
        overrides = [
            "training.new_run=false",
            "training.resume=auto",
            f"training.output_dir={quote(self._facts['directory'])}",
        ]
        if self._facts.get("joined"):
            overrides.append(f"++resource_pool.wait_s={self._facts['node_wait_s']}")
            overrides.append("++resource_pool.bad_nodes=exclude")
        return overrides

    def _wait_for(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for a process; return its exit code, negative = a signal.

        Forwards each signal, and kills the process if it still runs SHUTDOWN_S after the run's
        `stop_grace_s`; a later signal does not postpone this.
        """
        while True:
            try:
                return child.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            if self._signals:
                child.send_signal(self._signals.pop(0))
                grace_s = float(read_facts(self._file).get("stop_grace_s", 60.0))
                self._kill_at = min(self._kill_at, now + grace_s + SHUTDOWN_S)
            if now > self._kill_at:
                child.kill()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            ignore_hangups()
        self._stops = True
        self._signals.append(number)  # a terminal signals the child too, which expects both

    def _find_failure(self, code: int, reported: Mapping[str, Any]) -> Failure | None:
        """Read the attempt's failure.json, or make a failure from the exit code.

        The latter is printed and written to failure.json. None if no attempt has reported its run
        directory.

        Args:
            code: Exit code.
            reported: This attempt's facts. An attempt first moves an older failure.json away, then
                reports its directory; if it did not, failure.json is older.
        """
        end = f"ended with status {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                end = f"killed by {signal.Signals(-code).name}"
        if "directory" not in self._facts:
            if code != EXIT_FAILED:
                _say(f"failed: driver: {end}")
            return None
        directory = Path(self._facts["directory"])
        saved = 0
        with contextlib.suppress(OSError, ValueError):
            pointer = directory / "checkpoints" / "latest_checkpointed_iteration.txt"
            saved = int(pointer.read_text(encoding="utf-8"))
        if code == EXIT_MISTAKE:
            return Failure(None, None, saved)
        file = directory / "failure.json"
        record = read_facts(file) if "directory" in reported else {}
        if not record:
            record = {
                "message": f"driver: {end}",
                "error": end,
                "role": "driver",
                "phase": "driver",
                "cause": end,
                "iteration": current_iteration(directory / "metrics.jsonl"),
            }
            _say(f"failed: {record['message']}")
            with contextlib.suppress(OSError):  # a full disk
                write_facts(file, record)
        cause = tuple(record.get(key) for key in ("role", "phase", "error", "errno"))
        return Failure(record.get("iteration"), cause, saved)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def current_iteration(metrics: Path) -> int:
    """Return the iteration after the last one in metrics.jsonl; 1 if there is none, or no file."""
    with contextlib.suppress(OSError):
        for line in reversed(metrics.read_bytes().splitlines()):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off by a kill
                return int(json.loads(line)["iteration"]) + 1
    return 1
