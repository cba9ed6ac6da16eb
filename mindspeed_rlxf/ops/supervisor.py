"""Starts the training as a process of its own, and again after a failure.

The process that the user started stays small: it imports nothing but the standard library, hands
on signals, and decides by what the training process wrote down (`report_facts`, failure.json, the
pointer of the newest checkpoint). The training process dies with it. A restart is the same command
again, which resumes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mindspeed_rlxf.config.quoting import quoted
from mindspeed_rlxf.files.plain import open_plain, parse_json, read_pointer
from mindspeed_rlxf.files.printable import protect
from mindspeed_rlxf.ops.restarts import Failure, Restarts, smaller_pools
from mindspeed_rlxf.run.supervised import (
    CHILD_OF,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_MISTAKE,
    EXIT_STOPPED,
    read_facts,
    read_supervision,
    write_facts,
)

POINTER = Path("checkpoints") / "latest_checkpointed_iteration.txt"
PAUSE_S = 5.0  # before a restart: what the last attempt left is ended meanwhile
SHUTDOWN_S = 60.0  # beyond the grace, until a training process that does not stop is killed
LEGAL_S = 300.0  # for the check of a smaller size
LAST_LINES_BYTES = 64 * 1024
PR_SET_PDEATHSIG = 1
NOT_TRAINING = ("-h", "--help", "--cfg", "-c", "--cfg=job", "-cjob")
UNSUPERVISED = ("dry_run=true", "runtime=local", "runtime.kind=local", "training.max_restarts=0")


def supervise() -> int | None:
    """Runs this process's own command in a child until it ends for good; returns its exit code.

    None where this process has to do the work itself: it is that child, a rank of torchrun, a
    debugger's (runtime=local), or it trains nothing.
    """
    if given := read_supervision():
        _die_with(given[0])
        return None
    words = sys.argv[1:]
    if "WORLD_SIZE" in os.environ or any(word in NOT_TRAINING for word in words):
        return None
    if any(word.lstrip("+").lower() in UNSUPERVISED for word in words):
        return None
    for stream in (sys.stdout, sys.stderr):
        protect(stream)
    return Supervisor([sys.executable, *sys.orig_argv[1:]]).run()


def _die_with(parent: int) -> None:
    """The kernel kills this process when the supervisor ends, whatever ends it (Linux)."""
    # Until training watches signals: an end without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_STOPPED)


class Supervisor:
    def __init__(self, command: Sequence[str]) -> None:
        """command: of the training process; restarts add key=value to its end"""
        self._command, self._started = list(command), time.time()
        self._child: subprocess.Popen[bytes] | None = None
        self._stop: int | None = None  # the first signal that asked for an end
        self._kill_at = float("inf")
        self._facts: dict[str, Any] = {}
        self._file: Path | None = None  # that the training process writes them to

    def run(self) -> int:
        """Until it ends for good."""
        before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            with tempfile.TemporaryDirectory(prefix="rlxf-run-") as folder:
                return self._attempts(Path(folder) / "facts.json")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _attempts(self, file: Path) -> int:
        self._file, restarts = file, Restarts()
        changes, pools = list[str](), list[str]()  # pools: of a smaller size
        while True:
            write_facts(file, {})
            began = time.time()
            code = self._attempt(changes, file)
            told = read_facts(file)
            self._facts |= told
            if self._stop is not None and code not in (EXIT_DONE, EXIT_FAILED, EXIT_MISTAKE):
                return EXIT_STOPPED
            if "free" in told and restarts.used:
                pools = self._smaller(told["free"])
                if not pools:
                    return EXIT_STOPPED
                changes = self._changes() + pools
                continue
            if code in (EXIT_DONE, EXIT_STOPPED):
                return code
            if code == EXIT_MISTAKE:  # of a restart: the failure before it is what counts
                return EXIT_FAILED if restarts.used else code
            failure = self._failure(code, began)
            if failure is None or self._stop is not None:
                return EXIT_FAILED
            allowed, why = restarts.after(failure, int(self._facts.get("max_restarts", 0)))
            if not allowed:
                if why:
                    print(f"no restart: {why}", file=sys.stderr, flush=True)
                return EXIT_FAILED
            print(f"restart: {why}", file=sys.stderr, flush=True)
            time.sleep(PAUSE_S)
            if self._stop is not None:
                return EXIT_STOPPED
            changes = self._changes() + pools

    def _changes(self) -> list[str]:
        """Of the command when it is given again: the same directory, whatever characters are in
        its name, gone on from whatever was asked for; nodes in place of lost ones."""
        changes = ["training.new_run=false", "training.resume=auto"]
        changes.append(f"training.output_dir={quoted(self._facts['directory'])}")
        if self._facts.get("joined"):
            wait_s = self._facts["node_wait_s"]
            changes += [f"++resource_pool.wait_s={wait_s}", "++resource_pool.bad_nodes=leave_out"]
        return changes

    def _attempt(self, changes: Sequence[str], file: Path) -> int:
        """One training process; negative = the signal that killed it."""
        environment = {
            **os.environ,
            CHILD_OF: f"{os.getpid()}:{self._started}:{file}",
        }
        return self._ended(subprocess.Popen([*self._command, *changes], env=environment))

    def _ended(self, child: subprocess.Popen[bytes], limit_s: float = float("inf")) -> int:
        """The status of a process that is stopped with this one; killed at the limit."""
        self._child, started = child, time.monotonic()
        if self._stop is not None:  # came in between
            self._hand_on(child, self._stop)
        while True:
            try:
                return child.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                if time.monotonic() > min(self._kill_at, started + limit_s):
                    child.kill()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Hand it on; a terminal, and some schedulers, have signalled the child too: it knows."""
        if self._stop is None:
            self._stop = number
        if self._child is not None and self._child.poll() is None:
            self._hand_on(self._child, number)

    def _hand_on(self, child: subprocess.Popen[bytes], number: int) -> None:
        facts = read_facts(self._file) if self._file else {}
        grace_s = float(facts.get("stop_grace_s", 60.0))
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s + SHUTDOWN_S)
        child.send_signal(number)

    def _failure(self, code: int, began: float) -> Failure | None:
        """What this attempt wrote down, or in its place what is known of it."""
        if "directory" not in self._facts:  # the run was not begun
            if code != EXIT_FAILED:
                print(f"failed: driver: {ended(code)}", file=sys.stderr, flush=True)
            return None
        directory = Path(self._facts["directory"])
        pointer = directory / POINTER
        saved = _word(pointer)
        file = directory / "failure.json"
        found = read_facts(file) if file.exists() and file.stat().st_mtime >= began - 1.0 else {}
        if not found:
            found = {
                "message": f"driver: {ended(code)}",
                "error": "ProcessDied",
                "role": "driver",
                "phase": "driver",
                "cause": ended(code),
                "iteration": under_way(directory / "metrics.jsonl"),
            }
            print(f"failed: {found['message']}", file=sys.stderr, flush=True)
            try:
                write_facts(file, found)
            except OSError as error:
                print(f"warning: {file} cannot be written: {error}", file=sys.stderr, flush=True)
        cause = " ".join(str(found.get(key, "")) for key in ("role", "phase", "cause"))
        return Failure(found.get("iteration"), cause, saved)

    def _smaller(self, free: Sequence[int]) -> list[str]:
        """Changes to fewer processes, where that is wanted and a smaller size is legal; else none.

        free: devices of each node
        """
        if not self._facts.get("allow_shrink"):
            return []
        for pools in smaller_pools(self._facts["pools"], free):
            if self._stop is not None:
                return []
            wanted = [f"resource_pool.{name}={shape}" for name, shape in pools.items()]
            print(f"fewer devices: is {' '.join(wanted)} legal?", file=sys.stderr, flush=True)
            if self._is_legal(self._changes() + wanted):
                print(f"goes on with {' '.join(wanted)}", file=sys.stderr, flush=True)
                return wanted
        print("no smaller data-parallel size is legal", file=sys.stderr, flush=True)
        return []

    def _is_legal(self, changes: Sequence[str]) -> bool:
        command, nowhere = [*self._command, *changes, "dry_run=true"], subprocess.DEVNULL
        child = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)
        return self._ended(child, LEGAL_S) == EXIT_DONE


def under_way(metrics: Path) -> int:
    """The iteration after the last that metrics.jsonl has."""
    try:
        with open_plain(metrics) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_LINES_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 1
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off when it was killed
            return int(parse_json(line)["iteration"]) + 1
    return 1


def _word(pointer: Path) -> str:
    """What it holds; empty where it is missing or cannot be read."""
    try:
        return read_pointer(pointer)
    except OSError:
        return ""


def ended(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
