"""Allow one live run per run directory, by a file in which its holder counts.

The kernel's file locks are not used: over NFS one can outlive a host that is gone. On the holder's
host its process decides. Elsewhere a lock is stale when an observer has seen it unchanged for
STALE_S by its own clock. A holder that was taken for dead finds that before its next write.
"""

import contextlib
import json
import os
import socket
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.reporting.phases import phase
from mindspeed_rlxf.weights.atomic import replace_file

LOCK = "run.lock"
BEAT_S = 10.0  # between two counts of the holder
STALE_S = 120.0  # unchanged for so long = its holder is gone
SETTLE_S = 0.2  # after a stale lock was replaced: another process may have done so just then

_held: dict[Path, threading.Event] = {}  # set to end the counting
_seen: dict[Path, tuple[str, float]] = {}  # content of the locks of other hosts, since when


class LockLost(Exception):
    """Another process has taken the run directory, as this one seemed to be dead."""


def take(folder: Path) -> None:
    """Lock the folder for this process, and keep counting in the lock file until `release`.

    Raises UserError that names a live holder (see `find_holder`, which may wait).
    """
    file = folder / LOCK
    if file in _held:
        return
    while True:
        if found := _find_other_holder(folder):
            raise UserError(found)
        try:
            with open(file, "x", encoding="utf-8") as stream:
                stream.write(_note(0))
            break
        except FileExistsError:
            if _read(file) is None or _find_other_holder(folder):
                continue  # another process was faster
            replace_file(file, _note(0))
            time.sleep(SETTLE_S)
            if _is_mine(_read(file)):
                break
    _held[file] = threading.Event()
    threading.Thread(target=_count, args=(file, _held[file]), name="run lock", daemon=True).start()


def release(folder: Path) -> None:
    """Release the lock and remove its file, if this process has it."""
    file = folder / LOCK
    ended = _held.pop(file, None)
    if ended is not None:
        ended.set()
        if _is_mine(_read(file)):
            file.unlink(missing_ok=True)


def require(folder: Path) -> None:
    """Raise LockLost if this process took the lock and another one has it now.

    Call it before writing to the folder. A lock file that cannot be read is no reason.
    """
    file = folder / LOCK
    with contextlib.suppress(OSError):
        if file in _held and (text := _read(file)) is not None and not _is_mine(text):
            other = _parse(text)
            raise LockLost(f"process {other.get('pid')} on {other.get('host')} has taken {folder}")


def find_holder(folder: Path) -> Problem | None:
    """Return why this process cannot take the lock; None if it can, or has it already.

    If the lock is of another host, waits until it changes, or has been unchanged for STALE_S.
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
    """Return whether another process seems to have the lock; never waits, never takes it.

    A lock of another host counts until this process has seen it unchanged for STALE_S.
    """
    try:
        return folder / LOCK not in _held and _look(folder / LOCK)[0] is not None
    except OSError:
        return False


def _find_other_holder(folder: Path) -> Problem | None:
    file = folder / LOCK
    if file in _held:
        return None
    holder, is_sure = _look(file)
    if holder is not None and not is_sure:
        name = f"process {holder.get('pid')} on {holder.get('host')}"
        with phase(f"waiting up to {STALE_S:g} s for a sign of life of {name}"):
            while not is_sure:
                time.sleep(BEAT_S / 4)
                holder, is_sure = _look(file)
    if holder is None:
        return None
    return Problem(
        "training.output_dir",
        f"must not be in use, process {holder.get('pid')} on {holder.get('host')} runs in it",
        repr(str(folder)),
        "wait for it, end it, or set training.new_run=true",
    )


def _look(file: Path) -> tuple[dict[str, Any] | None, bool]:
    """Return (holder of the lock or None, whether that is sure)."""
    text = _read(file)
    if text is None:
        return None, True
    holder = _parse(text)
    if holder.get("machine") == _machine() != "":
        pid, started = holder.get("pid"), holder.get("started")
        return (holder, True) if started and _start_time(pid) == started else (None, True)
    before, since = _seen.setdefault(file, (text, time.monotonic()))
    if text != before:
        _seen[file] = text, time.monotonic()
        return holder, True
    return (holder, False) if time.monotonic() - since < STALE_S else (None, True)


def _count(file: Path, ended: threading.Event) -> None:
    number = 0
    while not ended.wait(BEAT_S):
        number += 1
        with contextlib.suppress(OSError), open(file, "r+", encoding="utf-8") as stream:
            if _is_mine(stream.read()):
                stream.seek(0)
                stream.write(_note(number))  # of equal length, to the file that was just read


def _note(number: int) -> str:
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine": _machine(),
        "started": _start_time(os.getpid()),
        "count": f"{number:012d}",
    }
    return json.dumps(holder) + "\n"


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _parse(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_mine(text: str | None) -> bool:
    mine, found = _parse(_note(0)), _parse(text or "")
    return all(found.get(key) == mine[key] for key in ("machine", "pid", "started"))


@cache
def _machine() -> str:
    """Name the boot of this host and its space of pids; containers of a host may differ in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: object) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
