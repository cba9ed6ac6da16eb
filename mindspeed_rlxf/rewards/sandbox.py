"""Run a policy's programs in bubblewrap, with limits over all their processes.

A program gets its own namespaces, a root with read-only system folders, a small tmpfs, a system
call filter, and kernel limits for each process. Every 50 ms we add up memory, CPU time, threads and
files over its processes, and kill its pid namespace if they exceed a limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

import psutil

from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.reward_section import SandboxConfig
from mindspeed_rlxf.rewards.outcome import ScoringBroken
from mindspeed_rlxf.rewards.system_calls import make_filter

BETWEEN_LOOKS_S = 0.05
KILL_S = 10.0
MIB = 1 << 20
PROGRAM, SCRATCH = "/box/program.py", "/tmp"
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": SCRATCH, "TMPDIR": SCRATCH, "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}  # fmt: skip
# Lower the limits, then run the program as __main__. Limits are set inside of the user namespace,
# which counts its own processes.
_RUN = """
def start():
    import json, resource, site, sys
    for name, soft, hard in json.loads(sys.argv.pop()):
        kind = getattr(resource, name)
        before = resource.getrlimit(kind)[1]
        if before != resource.RLIM_INFINITY:
            soft, hard = min(soft, before), min(hard, before)
        resource.setrlimit(kind, (soft, hard))
    site.setquit()
    del sys.argv[0]
    return sys.argv[0]
__file__ = start()
del start
exec(compile(open(__file__, "rb").read(), __file__, "exec"))
"""
_PLACES = """
import json, os, sys
paths = sys.executable, sys.prefix, sys.base_prefix
print(json.dumps([os.path.realpath(path) for path in paths]))
"""
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


class SandboxError(ScoringBroken):
    """The sandbox itself failed, not the program."""


@dataclass(frozen=True)
class Outcome:
    """A program's outcome.

    Attributes:
        stdout: Standard output, up to reward.sandbox.output_kb.
        exit: Exit code, or 128 + signal number.
        cause: "ok", "error" (exit code not 0), "killed" (by a signal), or the exceeded limit:
            "cpu_time", "wall_time", "memory", "output", "files", "processes".
        stderr: Beginning of standard error, for messages.
    """

    stdout: str
    exit: int
    cause: str
    stderr: str = ""


class Sandbox:
    """Runs programs one after the other, isolated from the host and from each other.

    `bwrap` is bubblewrap's path; None = only limits, no isolation.
    """

    def __init__(self, config: SandboxConfig, python: str, bwrap: str | None) -> None:
        self.config, self.bwrap = config, bwrap
        done = subprocess.run(
            [python, "-I", "-c", _PLACES],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
            env={},
        )
        if done.returncode:
            raise OSError(f"{python} does not start: {done.stderr[-200:].decode(errors='replace')}")
        executable, *prefixes = json.loads(done.stdout)
        # With packages the interpreter keeps its path, by which it finds those of a venv.
        self.python = os.path.abspath(python) if config.python else executable
        folders = [p for p in dict.fromkeys(prefixes) if not p.startswith("/usr")]
        home = Path("~").expanduser().resolve()
        if inside := [p for p in folders if bwrap and home.is_relative_to(p)]:
            raise OSError(f"{python} is installed in {inside[0]}, which holds the home {home}")
        system = "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"
        self._folders = [p for p in (*system, *folders) if os.path.lexists(p)]
        # Orphans of a program become our children, so that we see all of it end.
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER

    @classmethod
    def choose(cls, config: SandboxConfig) -> Sandbox:
        """Return a bubblewrap sandbox with `config.python` or the first Python that works.

        Raises:
            UserError: None works and `config.unsafe` is not set; has the reason.
        """
        bwrap = shutil.which("bwrap")
        reasons = [] if bwrap else ["bubblewrap (bwrap) is not installed"]
        own = getattr(sys, "_base_executable", None) or sys.executable
        system = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin") or own
        pythons = [config.python] if config.python else map(os.path.realpath, (own, system))
        candidates: list[tuple[str, str | None]] = [
            (python, bwrap) for python in dict.fromkeys(pythons) if bwrap
        ]
        if config.unsafe:
            candidates.append((config.python or sys.executable, None))
        for python, isolation in candidates:
            try:
                sandbox = cls(config, python, isolation)
                sandbox.probe()
                return sandbox
            except (OSError, subprocess.SubprocessError, SandboxError) as error:
                reasons.append(f"{python}: {error}")
        raise UserError(
            Problem(
                "reward.sandbox",
                f"programs of responses must run in bubblewrap, which fails here "
                f"({'; '.join(dict.fromkeys(reasons))})",
                remedy="install bubblewrap, allow user namespaces, name an interpreter that other "
                "users may read as reward.sandbox.python, or let programs do what you may do by "
                "reward.sandbox.unsafe=true",
                colon=True,
            )
        )

    def probe(self) -> None:
        """Run an empty program; raise SandboxError if it fails."""
        outcome = self._run("", "", self.config.wall_s)
        if outcome.cause != "ok":
            last = outcome.stderr.strip().rpartition("\n")[2]
            raise SandboxError(
                f"an empty program ends with {outcome.cause}, exit code {outcome.exit}: {last}"
            )

    def describe(self) -> str:
        """Return a line for the log."""
        without = "WITHOUT isolation, with your files and your network"
        how = "in bubblewrap; see docs/data_and_rewards.md" if self.bwrap else without
        return f"sandbox: programs run {how}"

    def run(self, program: str, stdin: str = "", wall_s: float | None = None) -> Outcome:
        """Run Python source code until it ends or exceeds a limit; kill all its processes.

        `wall_s` may lower reward.sandbox.wall_s.

        Raises:
            SandboxError: The sandbox no longer works: an empty program fails too.
        """
        outcome = self._run(program, stdin, min(wall_s or math.inf, self.config.wall_s))
        if self.bwrap and outcome.stderr.startswith("bwrap:"):
            self.probe()
        return outcome

    def _run(self, program: str, stdin: str, wall_s: float) -> Outcome:
        with contextlib.ExitStack() as stack:
            code, given, refused = (
                _open_read_only(stack, data)
                for data in (program.encode(errors="replace"), stdin.encode(errors="replace"),
                             make_filter() if self.bwrap else b"")
            )  # fmt: skip
            told, tell = os.pipe()
            told_file = stack.enter_context(os.fdopen(told))
            descriptors = (code, refused, tell)
            options: dict[str, Any] = {"cwd": "/", "env": ENVIRONMENT}
            if self.bwrap is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlxf-program-"))
                options = {"cwd": folder, "env": {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder}}
            elif os.geteuid() == 0:  # the kernel does not limit the processes of root
                uid = _fresh_uid()
                options |= {"user": uid, "group": uid, "extra_groups": []}
            try:
                process = subprocess.Popen(
                    [*self._options(*descriptors), *self._command(f"/dev/fd/{code}")],
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=descriptors,
                    start_new_session=True,
                    **options,
                )
            except OSError as error:
                raise SandboxError(f"{self.bwrap or self.python} does not start: {error}") from None
            finally:
                os.close(tell)
            stack.enter_context(process)
            found = self.bwrap and re.search(r'"child-pid": (\d+)', told_file.read())
            first = int(found[1]) if found else process.pid  # also if bubblewrap failed
            return _Run(self.config, process, first, bool(self.bwrap)).finish(wall_s)

    def _command(self, program: str) -> list[str]:
        c = self.config
        seconds, space = max(1, math.ceil(c.cpu_s)), (c.memory_mb + 128) * MIB  # Python maps 128
        size = c.file_mb * MIB
        limits = [
            ("RLIMIT_CPU", seconds, seconds + 1), ("RLIMIT_AS", space, space),
            ("RLIMIT_FSIZE", size, size), ("RLIMIT_NOFILE", c.files, c.files),
            ("RLIMIT_CORE", 0, 0), ("RLIMIT_MEMLOCK", 0, 0), ("RLIMIT_MSGQUEUE", 0, 0),
        ]  # fmt: skip
        if self.bwrap:  # else it would count all processes of this user; bwrap is two of them
            limits.append(("RLIMIT_NPROC", c.processes + 2, c.processes + 2))
            program = PROGRAM
        # Without packages `site` does not run, which is most of the start.
        without = [] if c.python else ["-S"]
        return [self.python, "-s", *without, "-c", _RUN, program, json.dumps(limits)]

    def _options(self, code: int, refused: int, tell: int) -> list[str]:
        if self.bwrap is None:
            return []
        options = [self.bwrap, "--unshare-user", "--unshare-all", "--die-with-parent"]
        options += ["--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"]
        for path in self._folders:
            link = os.path.islink(path)
            options += ["--symlink" if link else "--ro-bind"]
            options += [os.readlink(path) if link else path, path]
        for name in ("null", "zero", "full", "random", "urandom"):
            options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        options += ["--symlink", SCRATCH, "/dev/shm", "--file", str(code), PROGRAM]
        options += ["--size", str(self.config.file_mb * MIB), "--tmpfs", SCRATCH]
        options += ["--remount-ro", "/", "--chdir", SCRATCH, "--seccomp", str(refused)]
        return [*options, "--info-fd", str(tell), "--"]


class _Run:
    """A running program, until all its processes have ended.

    `first` is the pid namespace's first process, without isolation the program's.
    """

    def __init__(
        self, config: SandboxConfig, process: subprocess.Popen[bytes], first: int, isolated: bool
    ) -> None:
        self.config, self.process, self.first, self.isolated = config, process, first, isolated
        self.stdout, self.stderr = bytearray(), bytearray()
        self.limit = config.output_kb << 10
        outputs = [(process.stdout, self.stdout, self.limit), (process.stderr, self.stderr, 4096)]
        self.readers = [threading.Thread(target=_read, args=each, daemon=True) for each in outputs]

    def finish(self, wall_s: float) -> Outcome:
        """Wait until the program ends or exceeds a limit, and return its outcome."""
        try:
            for reader in self.readers:
                reader.start()
            cause = self._watch(time.monotonic() + wall_s)
        finally:
            self._kill_all()
        for reader in self.readers:
            reader.join(1.0)
        code = self.process.returncode
        code = 128 - code if code < 0 else code
        stderr = self.stderr.decode(errors="replace")
        if len(self.stdout) > self.limit:
            cause = cause or "output"
        if not cause and code > 128:
            cause = SIGNALS.get(code - 128, "killed")
        elif not cause:
            last = stderr.strip().rpartition("\n")[2]
            found = (cause for sign, cause in REFUSALS.items() if sign in last)
            cause = next(found, "error") if code else "ok"
        return Outcome(self.stdout[: self.limit].decode(errors="replace"), code, cause, stderr)

    def _watch(self, deadline: float) -> str:
        """Wait until the program ends (return "") or exceeds a limit (return its name)."""
        ended, pause = os.pidfd_open(self.process.pid), BETWEEN_LOOKS_S
        try:
            while not wait([ended], min(pause, deadline - time.monotonic())):
                started = time.monotonic()
                if started >= deadline:
                    return "wall_time"
                if exceeded := self._find_exceeded_limit():
                    return exceeded
                pause = max(BETWEEN_LOOKS_S, 4 * (time.monotonic() - started))
            return ""
        finally:
            os.close(ended)

    def _find_exceeded_limit(self) -> str:
        """Return the first limit exceeded by all processes together, "" for none."""
        memory, threads, cpu_s, processes = 0, 0, 0.0, _with_descendants(self.first)
        for process in processes:
            with contextlib.suppress(psutil.Error), process.oneshot():  # it may have ended
                cpu_s += sum(process.cpu_times()[:4])
                threads += process.num_threads()
                try:
                    memory += process.memory_full_info().pss
                except psutil.AccessDenied:  # a program can hide it
                    memory += process.memory_info().rss
        exceeded = {
            "output": len(self.stdout) > self.limit,
            "memory": memory > self.config.memory_mb * MIB,
            "processes": threads > self.config.processes + self.isolated,  # one of bubblewrap's
            "cpu_time": cpu_s > self.config.cpu_s,
            "files": self.isolated and self._has_too_many_files(processes),
        }
        return next((name for name, over in exceeded.items() if over), "")

    def _has_too_many_files(self, processes: list[psutil.Process]) -> bool:
        for process in reversed(processes):
            with contextlib.suppress(OSError):
                found = os.statvfs(f"/proc/{process.pid}/root{SCRATCH}")
                if found.f_blocks * found.f_frsize == self.config.file_mb * MIB:
                    used = found.f_files - found.f_ffree
                    return used >= self.config.files * 100 or not found.f_bfree
        return False

    def _kill_all(self) -> None:
        """Kill all processes; a pid namespace ends with its first process."""
        found = _with_descendants(self.first)
        if not self.isolated:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        for process in found[:1] if self.isolated else found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(KILL_S)
        psutil.wait_procs(found[:1], KILL_S)


def _read(stream: IO[bytes], output: bytearray, limit: int) -> None:
    """Read until the end, so that the program can write on; keep one byte over the limit."""
    with contextlib.suppress(OSError):  # closed while a process that got away still writes
        while read := os.read(stream.fileno(), 1 << 16):
            output += read[: limit + 1 - len(output)]


def _with_descendants(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _open_read_only(stack: contextlib.ExitStack, data: bytes) -> int:
    with os.fdopen(os.memfd_create("sandbox"), "wb") as file:
        file.write(data)
        file.flush()
        descriptor = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)
    stack.callback(os.close, descriptor)
    return descriptor


def _fresh_uid() -> int:
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    ranges = [[int(part) for part in line.split()] for line in lines]
    first, _, count = max(ranges, key=lambda each: each[2])
    high = min(first + count, (1 << 31) - 2)
    return random.SystemRandom().randrange((first + high) // 2, high)
