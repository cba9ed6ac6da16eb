"""A process, the warden, that starts, watches and ends programs, one after the other.

It reads one line of JSON for its settings and one for each program from standard input, and
answers each with one line. When standard input ends, because its parent closed it or is gone, the
warden kills everything that it started and ends. It has one thread, so that it can fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_rlxf.rewards.sandbox import linux
from mindspeed_rlxf.rewards.sandbox.launch import (
    INODES_PER_FILE,
    LAUNCHERS,
    Launcher,
    Streams,
    exit_code,
    make_sealed_file,
)
from mindspeed_rlxf.rewards.sandbox.limits import MIB, Limits
from mindspeed_rlxf.rewards.sandbox.processes import Descendants, measure
from mindspeed_rlxf.rewards.sandbox.view import SCRATCH, inspect_python

BETWEEN_LOOKS_S = 0.05
KILL_S = 10.0
STDERR_BYTES = 4096
# Text in the last line of standard error when the kernel enforced a limit -> cause of the end.
REFUSALS = {
    "MemoryError": "memory",
    "[Errno 12]": "memory",
    "[Errno 27]": "files",
    "[Errno 28]": "files",
    "[Errno 24]": "files",
    "can't start new thread": "processes",
    "[Errno 11] Resource temporarily unavailable": "processes",
}
SIGNALS: dict[int, str] = {signal.SIGXCPU: "cpu_time", signal.SIGXFSZ: "files"}


class ParentGone(Exception):
    """Standard input has ended: the parent process has closed it or is gone."""


@dataclass
class Output:
    """The output of a program so far.

    limit: bytes that are kept
    over:  True = the program wrote more than that
    """

    limit: int
    data: bytearray = field(default_factory=bytearray)
    over: bool = False

    def take(self, descriptor: int) -> bool:
        """Read up to 64 KiB of available output without waiting; keep what the limit allows.

        Returns False if there is none now or the output has ended. Sets `over` beyond the limit.
        """
        try:
            read = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        self.over |= len(self.data) + len(read) > self.limit
        self.data += read[: self.limit - len(self.data)]
        return bool(read)

    def text(self) -> str:
        return self.data.decode(errors="replace")


class Run:
    """One program, from its start until its processes and files are removed."""

    def __init__(self, launcher: Launcher, program: str, stdin: str, wall_s: float) -> None:
        self.limits = launcher.limits
        self.descendants = Descendants()
        self.stdout = Output(self.limits.output_kb << 10)
        self.stderr = Output(STDERR_BYTES)
        self.reaped: dict[int, int] = {}
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        given = make_sealed_file(stdin.encode(errors="replace"))
        self.sources = {out: self.stdout, err: self.stderr}
        self.folder: Path | None = None
        self.before = _reaped_cpu_s()
        self.deadline = time.monotonic() + wall_s
        try:
            self.started = launcher.start(
                program.encode(errors="replace"), Streams(given, out_end, err_end)
            )
            self.folder = self.started.folder
        except OSError:
            self._close()
            raise
        finally:
            for descriptor in (given, out_end, err_end):
                os.close(descriptor)
        for descriptor in self.sources:
            os.set_blocking(descriptor, False)

    def finish(self, wakeup: int) -> dict[str, Any]:
        """Wait until the program ends or exceeds a limit; kill its processes, remove its files.

        wakeup: descriptor that is readable when a child has ended
        Returns the fields of `runner.Outcome`. Raises ParentGone when standard input ends, and
        TimeoutError when killed processes are left after KILL_S; both after removing the files.
        """
        try:
            try:
                cause = self._watch_program(wakeup)
            finally:
                self._kill_descendants()
            for descriptor, output in self.sources.items():
                while not output.over and output.take(descriptor):
                    pass
        finally:
            self._close()
        code = exit_code(self.reaped.get(self.started.main, signal.SIGKILL))
        if not cause and self.stdout.over:
            cause = "output"
        return {
            "stdout": self.stdout.text(),
            "stderr": self.stderr.text(),
            "exit": code,
            "cause": cause or self._cause_of(code),
        }

    def _watch_program(self, wakeup: int) -> str:
        """Wait until the program ends or exceeds a limit; return the limit's name, "" if it ended.

        Reads its output meanwhile. Raises ParentGone when standard input ends.
        """
        poller = select.poll()
        for descriptor in (0, wakeup, *self.sources):
            poller.register(descriptor, select.POLLIN)
        next_look = 0.0
        while True:
            now = time.monotonic()
            if now >= self.deadline:
                return "wall_time"
            if now >= next_look:
                if cause := self._find_exceeded_limit():
                    return cause
                next_look = time.monotonic() + max(BETWEEN_LOOKS_S, 4 * (time.monotonic() - now))
            wait = min(self.deadline, next_look) - time.monotonic()
            for descriptor, _ in poller.poll(max(0.0, wait) * 1000):
                if descriptor == 0:
                    raise ParentGone
                if descriptor == wakeup:
                    os.read(wakeup, 4096)
                elif not self.sources[descriptor].take(descriptor):
                    poller.unregister(descriptor)
            if self.stdout.over:
                return "output"
            self._reap()
            if self.started.main in self.reaped:
                return ""

    def _find_exceeded_limit(self) -> str:
        """Return the first limit that all processes together exceed now, "" for none.

        In this order: "memory", "processes" (threads), "cpu_time"; "files" (number or space) only
        at levels with a file system of their own, which are those with `helpers`.
        """
        pids = self.descendants.find()
        use, limits = measure(pids), self.limits
        if use.memory > limits.memory_mb * MIB:
            return "memory"
        if use.threads > limits.processes + self.started.helpers:
            return "processes"
        if use.cpu_s + _reaped_cpu_s() - self.before > limits.cpu_s:
            return "cpu_time"
        return "files" if self.started.helpers and self._too_many_files(pids) else ""

    def _too_many_files(self, pids: set[int]) -> bool:
        """Whether the program's SCRATCH folder has too many files or no free space.

        Looks through one of the program's processes; False where none has such a folder.
        """
        limits = self.limits
        for pid in sorted(pids, reverse=True):
            try:
                found = os.statvfs(f"/proc/{pid}/root{SCRATCH}")
            except OSError:
                continue
            if found.f_blocks * found.f_frsize == limits.file_mb * MIB:
                used = found.f_files - found.f_ffree
                return used >= limits.files * INODES_PER_FILE or not found.f_bfree
        return False

    def _cause_of(self, code: int) -> str:
        """Return the cause of the end of a program that was not stopped, from its exit code.

        0 is "ok". Above 128 it is the limit whose signal ended the program ("cpu_time" for SIGKILL
        after that time), or "killed". Else it is the limit that the last line of standard error
        names, or "error".
        """
        if not code:
            return "ok"
        if code > 128:
            spent = _reaped_cpu_s() - self.before
            out_of_time = code == 128 + signal.SIGKILL and spent >= self.limits.cpu_s
            return "cpu_time" if out_of_time else SIGNALS.get(code - 128, "killed")
        last = self.stderr.text().strip().rpartition("\n")[2]
        return next((cause for sign, cause in REFUSALS.items() if sign in last), "error")

    def _kill_descendants(self) -> None:
        """Kill and reap all descendants of this process.

        Also all processes of the program's user, if it has a user of its own. Waits until none is
        left. Raises TimeoutError when some are left after KILL_S.
        """
        deadline = time.monotonic() + KILL_S
        while not self._reap():
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes of a program do not end within {KILL_S:g} s")
            if self.started.uid is not None:
                _kill_all_of(self.started.uid)
            for signalled in (signal.SIGSTOP, signal.SIGKILL):  # stopped, none starts another
                for pid in self.descendants.find():
                    _signal(pid, signalled)
            time.sleep(0.001)

    def _reap(self) -> bool:
        """Store the wait statuses of ended children in `reaped`; return whether no child is left.

        Does not wait for those that run.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if not pid:
                return False
            self.reaped[pid] = status

    def _close(self) -> None:
        for descriptor in self.sources:
            os.close(descriptor)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _kill_all_of(uid: int) -> None:
    """Kill every process of a user at once, by a forked process that becomes that user.

    Does not wait for them, nor for the forked process.
    """
    if not os.fork():
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _reaped_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _write_answer(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _open_launcher(settings: dict[str, Any]) -> Launcher:
    view = inspect_python(settings["python"], settings["packages"])
    return LAUNCHERS[settings["level"]](view, Limits(**settings["limits"]))


def main() -> int:
    os.umask(0o022)
    linux.become_subreaper()
    linux.allow_tracing(False)
    wakeup, wakeup_end = os.pipe()
    for descriptor in (wakeup, wakeup_end):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent ends us
    requests = os.fdopen(os.dup(0), "rb")
    try:
        launcher = _open_launcher(json.loads(requests.readline()))
    except (OSError, ValueError) as error:
        _write_answer({"failed": str(error)})
        return 1
    _write_answer({"ready": True})
    try:
        while line := requests.readline():
            try:
                _write_answer(Run(launcher, **json.loads(line)).finish(wakeup))
            except (OSError, ValueError) as error:
                _write_answer({"failed": str(error)})
    except ParentGone:
        pass
    finally:
        launcher.close()
    return 0
