"""Places that a run writes to: there, writable, with room, fast enough, of this host's time."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from mindspeed_rlxf.ops.doctor.findings import Finding, error, ok, warning
from mindspeed_rlxf.ops.doctor.host import GIB, MIB, size

SAMPLE_BYTES = 32 * MIB
SLOW_BYTES_S = 50 * MIB
LITTLE_FREE = 10 * GIB
RAY_FULL = 0.95  # share in use from which Ray takes no more objects to disk
CLOCK_S = 2.0
CHUNK = b"\xa5" * MIB


def existing(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def output_folder(path: Path, wanted: int = LITTLE_FREE) -> list[Finding]:
    """wanted: bytes that the run will write, where they are known."""
    folder = existing(path.absolute())
    free = shutil.disk_usage(folder).free
    value = f"{size(free)} free in {folder}"
    found = [ok("disk.free", value)]
    if free < wanted:
        remedy = "free some space, or set training.output_dir to another disk"
        found = [warning("disk.free", f"{value}, {size(wanted)} are wanted", remedy)]
    return found + write_speed(folder)


def write_speed(folder: Path, count: int = SAMPLE_BYTES) -> list[Finding]:
    """Writes `count` bytes, syncs, renames and removes them; also compares the clocks."""
    try:
        handle, name = tempfile.mkstemp(prefix=".rlxf-doctor-", dir=folder)
    except OSError as problem:
        remedy = "set training.output_dir to a folder that can be written"
        return [error("disk.write", f"{folder}: {problem.strerror}", remedy)]
    try:
        before = time.time()
        started = time.monotonic()
        with os.fdopen(handle, "wb") as file:
            for _ in range(max(count // len(CHUNK), 1)):
                file.write(CHUNK)
            file.flush()
            os.fsync(file.fileno())
        seconds = max(time.monotonic() - started, 1e-9)
        written = os.stat(name).st_mtime
        return [_speed(folder, count / seconds), _file_clock(folder, before, written, time.time())]
    except OSError as problem:
        remedy = "look at quota, free space and mount options of this disk"
        return [error("disk.write", f"{folder}: {problem.strerror}", remedy)]
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def _speed(folder: Path, bytes_s: float) -> Finding:
    value = f"{bytes_s / MIB:.0f} MiB/s with fsync in {folder}"
    if bytes_s >= SLOW_BYTES_S:
        return ok("disk.write", value)
    remedy = "checkpoints of large models will take long: set training.output_dir to a faster disk"
    return warning("disk.write", value, remedy)


def _file_clock(folder: Path, before: float, written: float, after: float) -> Finding:
    """The time stamp of a file server should be between our own before and after."""
    off = max(before - written, written - after, 0.0)
    if off <= CLOCK_S:
        return ok("disk.clock", f"time stamps in {folder} agree with this host")
    value = f"time stamps in {folder} are {off:.1f} s off this host's clock"
    return warning("disk.clock", value, "set both clocks by the same server (chrony, ntp)")


def ray_folder(path: Path | None = None) -> Finding:
    """Where Ray keeps logs and spilled objects."""
    folder = existing(path or Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()))
    usage = shutil.disk_usage(folder)
    in_use = usage.used / (usage.used + usage.free) if usage.used + usage.free else 0.0
    value = f"{size(usage.free)} free in {folder}, {in_use:.0%} in use"
    if not os.access(folder, os.W_OK | os.X_OK):
        return error("disk.ray_folder", f"{folder} cannot be written", "set RAY_TMPDIR to another")
    if in_use >= RAY_FULL or usage.free < GIB:
        remedy = "Ray stops spilling objects at 95%: free some space, or set RAY_TMPDIR"
        return warning("disk.ray_folder", value, remedy)
    return ok("disk.ray_folder", value)


def model_cache(path: Path | None = None) -> Finding:
    """Of Hugging Face libraries: tokenizers and their lock files go there."""
    default = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    path = path or default
    folder = existing(path.absolute())
    if os.access(folder, os.W_OK | os.X_OK):
        offline = " (offline)" if os.environ.get("HF_HUB_OFFLINE") else ""
        return ok("disk.model_cache", f"{path} can be written{offline}")
    return warning("disk.model_cache", f"no right to write in {folder}", "set HF_HOME to another")
