"""Check for Ray processes, and folders of ended Ray clusters, that earlier runs left behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from mindspeed_rlxf.ops.doctor.disk import ray_temp_dir
from mindspeed_rlxf.ops.doctor.findings import Finding, judge
from mindspeed_rlxf.ops.sizes import GIB, format_bytes

RAYLET, OWN_PREFIX = "raylet", "rlxf-ray-"
MANY_BYTES = GIB


def check_leftovers() -> list[Finding]:
    """Return a finding on the Ray processes and one on the Ray folders of this user."""
    lines = list(_own_commands())
    # Ray sets the second one in its own workers, as in the agents of `--cluster`.
    is_joined = any(os.environ.get(name) for name in ("RAY_ADDRESS", "RAY_RAYLET_PID"))
    return [check_processes(lines, is_joined), check_folders(ray_temp_dir(), lines)]


def check_processes(commands: Sequence[str], is_joined: bool) -> Finding:
    """Warn if any raylet process (one per Ray node) runs here, or more than one if `is_joined`.

    Else `ok`.
    commands:  command lines of this user's processes, the program first; those that contain
               OWN_PREFIX, of clusters that our own runs started, do not count
    is_joined: RAY_ADDRESS is set, or this process is a worker of a cluster
    """
    programs = [line.partition(" ")[0] for line in commands if OWN_PREFIX not in line]
    count = sum(Path(program).name == RAYLET for program in programs)
    remedy = "`ray stop` what is stale"
    if count == 1:
        remedy = "set RAY_ADDRESS (or runtime.address) to join it, or `ray stop` if it is stale"
    return judge(
        count <= int(is_joined),
        "ray.processes",
        f"{count} raylet(s) of yours run here" + (", one is meant" if is_joined else ""),
        remedy,
    )


def check_folders(root: Path, commands: Sequence[str]) -> Finding:
    """Warn if dead Ray session folders of this user take MANY_BYTES or more, else return `ok`.

    root:     folder with the session folders of Ray and of our own runs
    commands: command lines of running processes; a folder named in none of them is dead
    """
    named = "\n".join(commands)
    sessions = [*root.glob(f"{OWN_PREFIX}*"), *root.glob("ray/session_2*")]
    dead = [folder for folder in sessions if _is_own(folder) and str(folder) not in named]
    count = sum(map(_size_of_files, dead))
    value = f"{len(dead)} dead sessions in {root}, {format_bytes(count)}"
    shown = " ".join(map(str, dead[:3])) + (" ..." if len(dead) > 3 else "")
    return judge(count < MANY_BYTES, "ray.folders", value, f"rm -r {shown}")


def _own_commands() -> Iterator[str]:
    """Yield the command line, words joined by spaces, of each process with this real user id.

    Processes without one, or whose command line cannot be read, are left out.
    """
    for process in psutil.process_iter(["uids", "cmdline"]):
        uids, words = process.info["uids"], process.info["cmdline"]
        if uids and uids.real == os.getuid() and words:
            yield " ".join(words)


def _is_own(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
    return False


def _size_of_files(folder: Path) -> int:
    """Return the total size of the files below a folder, in bytes; 0 if the folder is missing.

    Links count with their own size. Files that cannot be read, as those just removed, count 0.
    """
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
