"""Start a program, in one way per level. It gets three standard streams and no other descriptor.

Exit codes are those of a shell: 128 + the number of the signal that ended the program.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from mindspeed_rlxf.rewards.sandbox import linux
from mindspeed_rlxf.rewards.sandbox.filter import make_filter
from mindspeed_rlxf.rewards.sandbox.limits import (
    MIB,
    Limits,
    counts_by_namespace,
    limit_processes,
    limit_this_process,
)
from mindspeed_rlxf.rewards.sandbox.rights import (
    NOBODY,
    become,
    fresh_uid,
    give_up_rights,
    new_user_namespace,
    raise_oom_score,
)
from mindspeed_rlxf.rewards.sandbox.root import build_root
from mindspeed_rlxf.rewards.sandbox.view import (
    DEVICES,
    LIBRARY_CACHE,
    PROGRAM,
    SCRATCH,
    View,
    copy_python,
)

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": SCRATCH, "TMPDIR": SCRATCH, "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}  # fmt: skip
INODES_PER_FILE = 100  # files that may exist per file that may be open
_NAMESPACES = (
    linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
)  # fmt: skip


@dataclass(frozen=True)
class Streams:
    """Descriptors that become the standard streams of a program."""

    stdin: int
    stdout: int
    stderr: int


@dataclass
class Started:
    """A running program.

    main:    process id; the program has ended when this process has
    helpers: number of the sandbox's own processes around the program
    uid:     user id that no other process of this host has; None = no such user was needed
    folder:  folder to remove after the run, None = none
    """

    main: int
    helpers: int = 0
    uid: int | None = None
    folder: Path | None = None


@dataclass
class Launcher:
    """Starts programs at one level, with one interpreter and the same limits for all."""

    view: View
    limits: Limits
    root: bool = field(default_factory=lambda: os.geteuid() == 0)
    warden: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        """Make the files that all programs share; none here.

        Raises OSError or ValueError where the level cannot be used on this host.
        """

    def start(self, program: bytes, streams: Streams) -> Started:
        """Start a Python program in a new process; return when it has been executed.

        program: source code
        Raises OSError where the isolation of the level cannot be set up.
        Bubblewrap sets it up afterwards: its errors are on the program's standard error.
        """
        raise AssertionError(f"{type(self).__name__} starts nothing")

    def close(self) -> None:
        """Remove files that all programs shared. Here: nothing."""


class Bubblewrap(Launcher):
    """Starts programs in new namespaces by bwrap(1)."""

    def start(self, program: bytes, streams: Streams) -> Started:
        uid = fresh_uid() if self.root else None
        code, refused = make_sealed_file(program), make_sealed_file(make_filter())
        try:
            main = _fork_program(lambda: self._enter(uid, code, refused), streams)
        finally:
            os.close(code)
            os.close(refused)
        return Started(main, helpers=2, uid=uid)

    def _enter(self, uid: int | None, code: int, refused: int) -> NoReturn:
        for descriptor in (code, refused):
            os.set_inheritable(descriptor, True)
        inside = self.view.command(PROGRAM)
        count = self.limits.processes + 2  # bwrap is two of them
        if uid is not None:
            limit_processes(count)
        elif counts_by_namespace() and (prlimit := shutil.which("prlimit")):
            inside = [prlimit, f"--nproc={count}:{count}", *inside]
        limit_this_process(self.limits)
        become(uid)
        linux.die_with_parent(signal.SIGKILL, self.warden)  # a change of user takes it back
        bwrap = shutil.which("bwrap") or "bwrap"
        os.execve(bwrap, [bwrap, *self._options(code, refused), "--", *inside], ENVIRONMENT)

    def _options(self, code: int, refused: int) -> list[str]:
        options = ["--unshare-user", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
        options += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
        for path in (*self.view.folders, LIBRARY_CACHE):
            if os.path.islink(path):
                options += ["--symlink", os.readlink(path), path]
            elif os.path.exists(path):
                options += ["--ro-bind", path, path]
        for name in DEVICES:
            options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        options += ["--symlink", SCRATCH, "/dev/shm", "--file", str(code), PROGRAM]
        options += ["--size", str(self.limits.file_mb * MIB), "--tmpfs", SCRATCH]
        options += ["--remount-ro", "/", "--chdir", SCRATCH, "--seccomp", str(refused)]
        return options


class Namespaces(Launcher):
    """Starts programs in new namespaces by unshare(2), with a user namespace unless we are root."""

    def start(self, program: bytes, streams: Streams) -> Started:
        uid = fresh_uid() if self.root else None
        main = _fork_program(lambda: self._enter(uid, program), streams)
        return Started(main, helpers=2, uid=uid)

    def _enter(self, uid: int | None, program: bytes) -> None:
        linux.die_with_parent(signal.SIGKILL, self.warden)
        if uid is None:
            new_user_namespace()
        linux.unshare(_NAMESPACES)
        if init := os.fork():
            _close_all_streams()
            _exit_like(init)
        # The first process of the pid namespace: when it ends, the kernel kills all others there.
        linux.die_with_parent(signal.SIGKILL, 0)
        linux.allow_tracing(False)
        size, inodes = self.limits.file_mb * MIB, self.limits.files * INODES_PER_FILE
        build_root(self.view.folders, program, f"mode=1777,size={size},nr_inodes={inodes}")
        if main := os.fork():
            _close_all_streams()
            _exit_like(main)
        os.setsid()
        if uid is not None:
            limit_processes(self.limits.processes)
        elif counts_by_namespace():
            limit_processes(self.limits.processes + 2)  # our helpers are in the namespace too
        self._execute(uid, PROGRAM)

    def _execute(self, uid: int | None, program: str) -> NoReturn:
        os.chdir(SCRATCH)
        limit_this_process(self.limits)
        give_up_rights(uid)
        os.execve(self.view.python, self.view.command(program), ENVIRONMENT)


class OtherUser(Launcher):
    """Starts each program as another, unused user, in a root folder with only Python in it.

    The program can write nowhere. Needs root.
    """

    def __post_init__(self) -> None:
        if not self.root:
            raise PermissionError("another user needs root")
        if self.view.packages:
            raise ValueError("reward.sandbox.python has packages, which are not copied")
        self._folder = Path(tempfile.mkdtemp(prefix="rlxf-sandbox-"))
        self._folder.chmod(0o755)
        try:
            copy_python(self.view, self._folder)
            (self._folder / "box").mkdir(mode=0o711)
        except OSError:
            self.close()
            raise

    def start(self, program: bytes, streams: Streams) -> Started:
        uid = fresh_uid()
        folder = Path(tempfile.mkdtemp(dir=self._folder / "box"))
        file = folder / "program.py"
        file.write_bytes(program)
        for path, mode in ((file, 0o640), (folder, 0o750)):
            os.chown(path, 0, uid)
            path.chmod(mode)
        try:
            main = _fork_program(lambda: self._enter(uid, f"/box/{folder.name}"), streams)
        except OSError:
            shutil.rmtree(folder)
            raise
        return Started(main, uid=uid, folder=folder)

    def _enter(self, uid: int, folder: str) -> NoReturn:
        os.chroot(self._folder)
        os.chdir(folder)
        limit_this_process(self.limits)
        limit_processes(self.limits.processes)
        give_up_rights(uid)
        linux.die_with_parent(signal.SIGKILL, self.warden)
        command = self.view.command(f"{folder}/program.py")
        os.execve(self.view.python, command, ENVIRONMENT)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class LimitsAlone(Launcher):
    """Starts programs with the files and network of this user; only limits apply."""

    def start(self, program: bytes, streams: Streams) -> Started:
        folder = Path(tempfile.mkdtemp(prefix="rlxf-sandbox-"))
        (folder / "program.py").write_bytes(program)
        try:
            main = _fork_program(lambda: self._enter(folder), streams)
        except OSError:
            shutil.rmtree(folder)
            raise
        return Started(main, folder=folder)

    def _enter(self, folder: Path) -> NoReturn:
        os.chdir(folder)
        limit_this_process(self.limits)
        give_up_rights(None)
        linux.die_with_parent(signal.SIGKILL, self.warden)
        environment = ENVIRONMENT | {"HOME": str(folder), "TMPDIR": str(folder)}
        os.execve(self.view.python, self.view.command(str(folder / "program.py")), environment)


LAUNCHERS: dict[str, type[Launcher]] = {
    "bubblewrap": Bubblewrap,
    "namespaces": Namespaces,
    "uid": OtherUser,
    "limits": LimitsAlone,
}
"""Name of a level -> its launcher."""


def _fork_program(enter: Callable[[], None], streams: Streams) -> int:
    """Fork a child that calls `enter` to execute the program.

    It has its own session, umask 022, a raised OOM score, and default handlers of SIGCHLD, SIGPIPE,
    SIGTERM and SIGINT.

    streams: become the child's standard streams
    Waits until the program is executed; returns the pid of the child, which may be a helper process
    around the program. Raises ChildProcessError (an OSError) with the child's error if it fails
    before; the child is not reaped then.
    """
    report, failed = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            os.umask(0o022)
            linux.allow_tracing(True)  # to write to files of its own in /proc
            raise_oom_score()
            for standard, descriptor in enumerate((streams.stdin, streams.stdout, streams.stderr)):
                os.dup2(descriptor, standard)
            enter()
        except BaseException as error:
            os.write(failed, f"{type(error).__name__}: {error}".encode()[:500])
        os._exit(127)
    os.close(failed)
    with os.fdopen(report, "rb") as stream:
        reason = stream.read().decode(errors="replace")
    if reason:
        raise ChildProcessError(reason)
    return pid


def _exit_like(pid: int) -> NoReturn:
    """Wait for children until `pid` ends; exit with its exit code, 128 + n if signal n ended it."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            os._exit(exit_code(status))


def exit_code(status: int) -> int:
    """Convert a status of wait(2) to the exit code that a shell gives."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _close_all_streams() -> None:
    """Close all descriptors below 1024.

    Among them are the standard streams, and the end of the pipe on which `_fork_program` waits in
    the parent process.
    """
    os.closerange(0, 1024)


def make_sealed_file(data: bytes) -> int:
    """Return the descriptor, at offset 0, of a memory file with `data` that cannot be changed."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
