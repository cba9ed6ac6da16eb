"""Check the folders that a run writes to: rights, free space, speed and the file server's clock."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from mindspeed_rlxf.ops.doctor.findings import Finding, error, judge
from mindspeed_rlxf.ops.sizes import GIB, MIB, existing_folder, format_bytes

SAMPLE_BYTES = 32 * MIB
SLOW_BYTES_S = 50 * MIB
LITTLE_FREE = 10 * GIB
RAY_FULL = 0.95  # share in use from which Ray takes no more objects to disk
CLOCK_S = 2.0
CHUNK = b"\xa5" * MIB


def output_folder(path: Path, wanted: int = LITTLE_FREE) -> list[Finding]:
    """Check free space, write speed and clock of the disk that the run directory will be on.

    path: need not exist, its nearest existing parent is checked
    wanted: free bytes; less is a warning
    Writes a temporary file, see `write_speed`.
    """
    folder = existing_folder(path.absolute())
    free = shutil.disk_usage(folder).free
    return [
        judge(
            free >= wanted,
            "disk.free",
            f"{format_bytes(free)} free in {folder}, {format_bytes(wanted)} are wanted",
            "free some space, or set training.output_dir to another disk",
        ),
        *write_speed(folder),
    ]


def write_speed(folder: Path, count: int = SAMPLE_BYTES) -> list[Finding]:
    """Write a temporary file of `count` bytes with fsync; check speed and time stamp; delete it.

    A file that cannot be created or written is an error in the findings.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=".rlxf-doctor-", dir=folder)
    except OSError as problem:
        remedy = "set training.output_dir to a folder that can be written"
        return [error("disk.write", f"{folder}: {problem.strerror}", remedy)]
    try:
        before, started = time.time(), time.monotonic()
        with os.fdopen(handle, "wb") as file:
            for _ in range(max(count // len(CHUNK), 1)):
                file.write(CHUNK)
            file.flush()
            os.fsync(file.fileno())
        bytes_s = count / max(time.monotonic() - started, 1e-9)
        written = os.stat(name).st_mtime
    except OSError as problem:
        remedy = "look at quota, free space and mount options of this disk"
        return [error("disk.write", f"{folder}: {problem.strerror}", remedy)]
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)
    speed = f"{bytes_s / MIB:.0f} MiB/s with fsync in {folder}"
    return [
        judge(
            bytes_s >= SLOW_BYTES_S,
            "disk.write",
            speed,
            "checkpoints of large models will take long: set training.output_dir to a faster disk",
        ),
        _file_clock(folder, before, written, time.time()),
    ]


def _file_clock(folder: Path, before: float, written: float, after: float) -> Finding:
    """Warn if a file's time stamp is over CLOCK_S outside the interval in which it was written.

    before, after: this host's clock around the writing; written: time stamp of the file
    """
    off = max(before - written, written - after, 0.0)
    return judge(
        off <= CLOCK_S,
        "disk.clock",
        f"time stamps in {folder} are {off:.1f} s off this host's clock",
        "set both clocks by the same server (chrony, ntp)",
    )


def ray_temp_dir() -> Path:
    """Return the folder of Ray's logs and spilled objects: RAY_TMPDIR or the temporary folder."""
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())


def ray_folder() -> Finding:
    """Check that Ray's folder is writable (else an error) and has free space to spill objects.

    A disk that is full to RAY_FULL, or has under 1 GiB free, is a warning. A folder that does not
    exist is judged by its nearest parent that does.
    """
    check, folder = "disk.ray_folder", existing_folder(ray_temp_dir())
    if not os.access(folder, os.W_OK | os.X_OK):
        return error(check, f"{folder} cannot be written", "set RAY_TMPDIR to another")
    usage = shutil.disk_usage(folder)
    in_use = usage.used / max(usage.used + usage.free, 1)
    return judge(
        in_use < RAY_FULL and usage.free >= GIB,
        check,
        f"{format_bytes(usage.free)} free in {folder}, {in_use:.0%} in use",
        "Ray stops spilling objects at 95%: free some space, or set RAY_TMPDIR",
    )


def model_cache() -> Finding:
    """Warn if the Hugging Face cache is not writable, else return `ok`.

    A folder that does not exist is judged by its nearest parent that does.
    """
    path = huggingface_home()
    is_writable = os.access(existing_folder(path.absolute()), os.W_OK | os.X_OK)
    offline = " (offline)" if os.environ.get("HF_HUB_OFFLINE") else ""
    return judge(
        is_writable,
        "disk.model_cache",
        f"{path} can{'' if is_writable else 'not'} be written{offline}",
        "set HF_HOME to another",
    )


def huggingface_home() -> Path:
    """Return the Hugging Face folder: HF_HOME, else `~/.cache/huggingface`."""
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
