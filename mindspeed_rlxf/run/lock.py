"""Allow one live run per run directory, by a file lock that the kernel drops with its process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import IO

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.files.safe import PRIVATE, open_file

LOCK = "run.lock"
_held: dict[Path, IO[str]] = {}


def take(folder: Path, mode: int = PRIVATE) -> None:
    """Lock the folder for this process, and write host and pid to the lock file; no waiting.

    Does nothing if this process has the lock. Raises UserError that names another process with it,
    and OSError where the lock file is a link. It is a byte-range lock: NFS shares it between hosts,
    and forked children do not inherit it. On a file system without locks, the written host and pid
    decide.
    """
    file = folder / LOCK
    if file in _held:
        return
    while True:
        stream = open_file(file, "a+", mode, encoding="utf-8")
        if found := _try_lock(folder, stream):
            stream.close()
            raise UserError(found)
        if _is_same_file(file, stream):
            break
        stream.close()  # the last holder removed the file after this process had opened it
    stream.seek(0)
    stream.truncate()
    stream.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}) + "\n")
    stream.flush()
    _held[file] = stream


def release(folder: Path) -> None:
    """Release the lock and remove its file, if this process has it."""
    file = folder / LOCK
    stream = _held.pop(file, None)
    if stream is not None:
        file.unlink(missing_ok=True)
        stream.close()


def find_holder(folder: Path) -> Problem | None:
    """Return why this process cannot take the lock; None if it can, or has it already.

    A free lock is held during the call, so that a `take` of another process fails meanwhile. A lock
    file that cannot be opened is also a reason.
    """
    try:
        return _find_other_holder(folder)
    except OSError as error:
        return Problem(
            "training.output_dir",
            f"must have a lock that this user can take: {error.strerror}",
            repr(str(folder)),
            f"remove {LOCK}, or set training.new_run=true",
        )


def is_locked(folder: Path) -> bool:
    """Return whether another process has the lock.

    False if there is no lock file, or it cannot be opened. Takes a free lock as `find_holder` does.
    """
    try:
        return _find_other_holder(folder) is not None
    except OSError:
        return False


def _find_other_holder(folder: Path) -> Problem | None:
    """Return a problem if another process has the lock; None if this one has it or nobody has.

    None also without a lock file. On a file system without locks the process that the file names
    counts, if it is alive. Holds a free lock during the call. Raises OSError if the file cannot be
    opened.
    """
    file = folder / LOCK
    if file in _held or not os.path.lexists(file):
        return None
    with open_file(file, "r+", None, encoding="utf-8") as stream:
        return _try_lock(folder, stream)


def _try_lock(folder: Path, stream: IO[str]) -> Problem | None:
    """Lock the opened file, without waiting; return a problem if another process has it.

    None if the file is now locked, and also where the file system refuses for another reason,
    unless the process that the file names is alive.
    """
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        host, pid = _read_holder(stream)
        if error.errno in (errno.EACCES, errno.EAGAIN) or _is_alive(host, pid):
            return Problem(
                "training.output_dir",
                f"must not be in use, process {pid} on {host} runs in it",
                repr(str(folder)),
                f"wait for it, end it, or set training.new_run=true (if it is gone, remove {LOCK})",
            )
    return None


def _is_same_file(file: Path, stream: IO[str]) -> bool:
    """Return whether `file` is still the opened file; False if it was removed or replaced."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False


def _read_holder(stream: IO[str]) -> tuple[str, int]:
    """Read (host, pid) of the process that holds the lock; ("another host", 0) when unreadable."""
    stream.seek(0)
    try:
        note = json.loads(stream.read())
        return str(note["host"]), int(note["pid"])
    except (ValueError, KeyError, TypeError, OverflowError):  # the last for Infinity
        return "another host", 0


def _is_alive(host: str, pid: int) -> bool:
    """Return whether the process may be alive; one of another host counts as alive, pid 0 not."""
    return pid > 0 and (host != socket.gethostname() or Path(f"/proc/{pid}").exists())
