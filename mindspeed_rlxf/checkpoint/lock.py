"""Allow one live run per run directory, by a lock file with a counter.

Kernel file locks are not used: over NFS one can outlive its host. On the holder's host, the
process table decides. Elsewhere, a lock is stale once an observer has seen it unchanged for
STALE_S by its own clock. A holder declared dead notices before its next write.
"""

import contextlib
import json
import os
import socket
import threading
import time
from functools import cache
from pathlib import Path

from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.reporting.phases import phase
from mindspeed_rlxf.weights.atomic import replace_file

LOCK = "run.lock"
HOST = socket.gethostname()
BEAT_S = 10.0  # between two counts of the holder
STALE_S = 120.0  # unchanged for so long = its holder is gone
SETTLE_S = 0.2  # after a stale lock was replaced: another process may have done so just then

_held: dict[Path, threading.Event] = {}  # set to end the counting
_seen: dict[Path, tuple[str, float]] = {}  # content of other hosts' locks, unchanged since when


class LockLost(Exception):
    """Another process has taken the run directory, because this one seemed dead."""


def take(folder: Path) -> None:
    """Lock the folder for this process, and keep counting in the lock file until `release`.

    Raises UserError if another live process holds it (see `find_holder`, which may wait).
    """
    file = folder / LOCK
    while file not in _held:
        in_use = find_holder(folder)
        if in_use is not None:
            raise UserError(in_use)
        try:
            with open(file, "x", encoding="utf-8") as stream:
                stream.write(_note())
        except FileExistsError:
            if _look(file) != ("", True):
                continue  # another process was faster
            replace_file(file, _note())
            time.sleep(SETTLE_S)
            if not _is_mine(_read(file)):
                continue
        _held[file] = threading.Event()
        arguments = file, _held[file]
        threading.Thread(target=_count, args=arguments, name="run lock", daemon=True).start()


def release(folder: Path) -> None:
    """Release the lock and remove its file, if this process holds it."""
    file = folder / LOCK
    if file in _held:
        _held.pop(file).set()
        if _is_mine(_read(file)):
            file.unlink(missing_ok=True)


def require(folder: Path) -> None:
    """Raise LockLost if another process holds the lock taken by this one.

    Call it before each write to the folder. An unreadable lock file is ignored.
    """
    file = folder / LOCK
    if file not in _held:
        return
    with contextlib.suppress(OSError):
        text = _read(file)
        if text and not _is_mine(text):
            raise LockLost(f"{_describe(text)} has taken {folder}")


def find_holder(folder: Path) -> Problem | None:
    """Return why this process cannot take the lock; None if it can, or already holds it.

    For a lock from another host, waits until it changes or has been unchanged for STALE_S.
    """
    holder, is_sure = _look(folder / LOCK)
    if not is_sure:
        with phase(f"waiting up to {STALE_S:g} s for a sign of life of {holder}"):
            while not is_sure:
                time.sleep(BEAT_S / 4)
                holder, is_sure = _look(folder / LOCK)
    if not holder:
        return None
    return Problem(
        "training.output_dir",
        f"must not be in use, {holder} runs in it",
        repr(str(folder)),
        "wait for it, end it, or set training.new_run=true",
    )


def is_locked(folder: Path) -> bool:
    """Return whether another process seems to hold the lock, without waiting.

    A lock from another host counts until this process has seen it unchanged for STALE_S.
    """
    with contextlib.suppress(OSError):
        return bool(_look(folder / LOCK)[0])
    return False


def _look(file: Path) -> tuple[str, bool]:
    """Return (name of another process holding the lock, or ""; whether this is certain)."""
    text = None if file in _held else _read(file)
    if text is None:
        return "", True
    holder = _parse(text)
    if holder.get("machine") == _machine() != "":
        started = holder["started"]
        # The pid alone is not enough: after the holder's end another process may get it.
        is_alive = bool(started) and _start_time(holder["pid"]) == started
        if not is_alive:
            return "", True
        return _describe(text), True
    text_before, unchanged_since = _seen.setdefault(file, (text, time.monotonic()))
    if text != text_before:
        _seen[file] = text, time.monotonic()
        return _describe(text), True
    if time.monotonic() - unchanged_since < STALE_S:
        return _describe(text), False
    return "", True


def _count(file: Path, ended: threading.Event) -> None:
    number = 0
    while not ended.wait(BEAT_S):
        number += 1
        with contextlib.suppress(OSError), open(file, "r+", encoding="utf-8") as stream:
            if _is_mine(stream.read()):
                stream.seek(0)
                stream.write(f"{_note()}{number}\n")  # to the file that was just read


def _note() -> str:
    holder = {"host": HOST, "pid": os.getpid(), "machine": _machine()}
    return json.dumps({**holder, "started": _start_time(os.getpid())}) + "\n"


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _parse(text: str) -> dict[str, str]:
    try:
        return dict(json.loads(text.partition("\n")[0]))
    except ValueError:  # its holder was killed before it had written
        return {}


def _describe(text: str) -> str:
    holder = _parse(text)
    return f"process {holder.get('pid')} on {holder.get('host')}"


def _is_mine(text: str | None) -> bool:
    return (text or "").startswith(_note())


@cache
def _machine() -> str:
    """Name this boot and its pid namespace; containers on one host may differ in the latter."""
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
