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
PROGRAM = "/box/program.py"  # inside of the sandbox
SCRATCH = "/tmp"  # the only folder that it may write to
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
_PRINT_PYTHON_PATHS = """
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
        self.config = config
        self.bwrap = bwrap
        printed = subprocess.run(
            [python, "-I", "-c", _PRINT_PYTHON_PATHS],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
            env={},
        )
        if printed.returncode:
            reason = printed.stderr[-200:].decode(errors="replace")
            raise OSError(f"{python} does not start: {reason}")
        executable, *prefixes = json.loads(printed.stdout)
        # With packages the interpreter keeps its path, by which it finds those of a venv.
        self.python = os.path.abspath(python) if config.python else executable
        folders = [path for path in dict.fromkeys(prefixes) if not path.startswith("/usr")]
        home = Path("~").expanduser().resolve()
        for folder in folders:
            if bwrap and home.is_relative_to(folder):
                raise OSError(f"{python} is installed in {folder}, which holds the home {home}")
        system_paths = "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"
        self._folders = [path for path in (*system_paths, *folders) if os.path.lexists(path)]
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
        this_python = getattr(sys, "_base_executable", None) or sys.executable
        system_python = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin") or this_python
        if config.python:
            pythons = [config.python]
        else:
            pythons = [os.path.realpath(this_python), os.path.realpath(system_python)]
        candidates: list[tuple[str, str | None]] = []
        if bwrap:
            candidates += [(python, bwrap) for python in dict.fromkeys(pythons)]
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
            reason = outcome.stderr.strip().rpartition("\n")[2]
            raise SandboxError(
                f"an empty program ends with {outcome.cause}, exit code {outcome.exit}: {reason}"
            )

    def describe(self) -> str:
        """Return a line for the log."""
        if self.bwrap:
            return "sandbox: programs run in bubblewrap; see docs/data_and_rewards.md"
        return "sandbox: programs run WITHOUT isolation, with your files and your network"

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
            code = _open_read_only(stack, program.encode(errors="replace"))
            stdin_file = _open_read_only(stack, stdin.encode(errors="replace"))
            call_filter = _open_read_only(stack, make_filter() if self.bwrap else b"")
            info_read, info_write = os.pipe()  # by which bubblewrap says the pid of its child
            info_file = stack.enter_context(os.fdopen(info_read))
            descriptors = (code, call_filter, info_write)
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
                    stdin=stdin_file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=descriptors,
                    start_new_session=True,
                    **options,
                )
            except OSError as error:
                raise SandboxError(f"{self.bwrap or self.python} does not start: {error}") from None
            finally:
                os.close(info_write)
            stack.enter_context(process)
            first_pid = process.pid  # also if bubblewrap failed
            child_pid = self.bwrap and re.search(r'"child-pid": (\d+)', info_file.read())
            if child_pid:
                first_pid = int(child_pid[1])
            return _Run(self.config, process, first_pid, bool(self.bwrap)).finish(wall_s)

    def _command(self, program: str) -> list[str]:
        c = self.config
        cpu_s = max(1, math.ceil(c.cpu_s))
        address_bytes = (c.memory_mb + 128) * MIB  # Python maps 128
        file_bytes = c.file_mb * MIB
        limits = [
            ("RLIMIT_CPU", cpu_s, cpu_s + 1), ("RLIMIT_AS", address_bytes, address_bytes),
            ("RLIMIT_FSIZE", file_bytes, file_bytes), ("RLIMIT_NOFILE", c.files, c.files),
            ("RLIMIT_CORE", 0, 0), ("RLIMIT_MEMLOCK", 0, 0), ("RLIMIT_MSGQUEUE", 0, 0),
        ]  # fmt: skip
        if self.bwrap:  # else it would count all processes of this user; bwrap is two of them
            limits.append(("RLIMIT_NPROC", c.processes + 2, c.processes + 2))
            program = PROGRAM
        # Without packages `site` does not run, which is most of the start.
        no_site = [] if c.python else ["-S"]
        return [self.python, "-s", *no_site, "-c", _RUN, program, json.dumps(limits)]

    def _options(self, code: int, call_filter: int, info: int) -> list[str]:
        """Return bubblewrap's command line up to the program; the arguments are descriptors."""
        if self.bwrap is None:
            return []
        options = [self.bwrap, "--unshare-user", "--unshare-all", "--die-with-parent"]
        options += ["--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"]
        for path in self._folders:
            if os.path.islink(path):
                options += ["--symlink", os.readlink(path), path]
            else:
                options += ["--ro-bind", path, path]
        for name in ("null", "zero", "full", "random", "urandom"):
            options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        options += ["--symlink", SCRATCH, "/dev/shm", "--file", str(code), PROGRAM]
        options += ["--size", str(self.config.file_mb * MIB), "--tmpfs", SCRATCH]
        options += ["--remount-ro", "/", "--chdir", SCRATCH, "--seccomp", str(call_filter)]
        return [*options, "--info-fd", str(info), "--"]


class _Run:
    """A running program, until all its processes have ended.

    `first_pid` is the pid namespace's first process, without isolation the program's.
    """

    def __init__(
        self,
        config: SandboxConfig,
        process: subprocess.Popen[bytes],
        first_pid: int,
        isolated: bool,
    ) -> None:
        self.config = config
        self.process = process
        self.first_pid = first_pid
        self.isolated = isolated
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.limit = config.output_kb << 10  # bytes of standard output
        self.readers = []
        for arguments in (
            (process.stdout, self.stdout, self.limit),
            (process.stderr, self.stderr, 4096),
        ):
            self.readers.append(threading.Thread(target=_read, args=arguments, daemon=True))

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
            cause = _find_refusal(stderr) if code else "ok"
        return Outcome(self.stdout[: self.limit].decode(errors="replace"), code, cause, stderr)

    def _watch(self, deadline: float) -> str:
        """Wait until the program ends (return "") or exceeds a limit (return its name)."""
        end_descriptor = os.pidfd_open(self.process.pid)  # readable once the program has ended
        pause_s = BETWEEN_LOOKS_S
        try:
            while not wait([end_descriptor], min(pause_s, deadline - time.monotonic())):
                started = time.monotonic()
                if started >= deadline:
                    return "wall_time"
                exceeded = self._find_exceeded_limit()
                if exceeded:
                    return exceeded
                # Where a look takes long, we spend a fifth of the time on them at most.
                pause_s = max(BETWEEN_LOOKS_S, 4 * (time.monotonic() - started))
            return ""
        finally:
            os.close(end_descriptor)

    def _find_exceeded_limit(self) -> str:
        """Return the first limit exceeded by all processes together, "" for none."""
        memory_bytes = 0
        num_threads = 0
        cpu_s = 0.0
        processes = _with_descendants(self.first_pid)
        for process in processes:
            with contextlib.suppress(psutil.Error), process.oneshot():  # it may have ended
                cpu_s += sum(process.cpu_times()[:4])
                num_threads += process.num_threads()
                try:
                    memory_bytes += process.memory_full_info().pss
                except psutil.AccessDenied:  # a program can hide it
                    memory_bytes += process.memory_info().rss
        if len(self.stdout) > self.limit:
            return "output"
        if memory_bytes > self.config.memory_mb * MIB:
            return "memory"
        if num_threads > self.config.processes + self.isolated:  # one of bubblewrap's
            return "processes"
        if cpu_s > self.config.cpu_s:
            return "cpu_time"
        if self.isolated and self._has_too_many_files(processes):
            return "files"
        return ""

    def _has_too_many_files(self, processes: list[psutil.Process]) -> bool:
        for process in reversed(processes):
            with contextlib.suppress(OSError):
                scratch = os.statvfs(f"/proc/{process.pid}/root{SCRATCH}")
                # Its size tells the tmpfs of the sandbox from the host's.
                if scratch.f_blocks * scratch.f_frsize == self.config.file_mb * MIB:
                    num_files = scratch.f_files - scratch.f_ffree
                    return num_files >= self.config.files * 100 or not scratch.f_bfree
        return False

    def _kill_all(self) -> None:
        """Kill all processes; a pid namespace ends with its first process."""
        processes = _with_descendants(self.first_pid)
        if not self.isolated:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        for process in processes[:1] if self.isolated else processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(KILL_S)
        psutil.wait_procs(processes[:1], KILL_S)


def _find_refusal(stderr: str) -> str:
    """Return the limit that the last line of standard error is about, else "error"."""
    last_line = stderr.strip().rpartition("\n")[2]
    for text, cause in REFUSALS.items():
        if text in last_line:
            return cause
    return "error"


def _read(stream: IO[bytes], output: bytearray, limit: int) -> None:
    """Read until the end, so that the program can write on; keep one byte over the limit."""
    with contextlib.suppress(OSError):  # closed while a process that got away still writes
        while True:
            chunk = os.read(stream.fileno(), 1 << 16)
            if not chunk:
                return
            output += chunk[: limit + 1 - len(output)]


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
    """Return a random user id of the upper half of the largest range that exists here."""
    ranges = []  # (number of ids, first id)
    for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines():
        first_id, _, num_ids = map(int, line.split())
        ranges.append((num_ids, first_id))
    num_ids, first_id = max(ranges, key=lambda num_and_first: num_and_first[0])
    end = min(first_id + num_ids, (1 << 31) - 2)
    return random.SystemRandom().randrange((first_id + end) // 2, end)
