"""What earlier runs of this user left behind: Ray processes, and folders of dead clusters."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from mindspeed_rlxf.ops.doctor.findings import Finding, ok, warning
from mindspeed_rlxf.ops.doctor.host import size

RAYLET, OWN_PREFIX = "raylet", "rlxf-ray-"
MANY_BYTES = 1024**3


def look() -> list[Finding]:
    root = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    lines = list(_commands_of_mine())
    return [processes(lines, bool(os.environ.get("RAY_ADDRESS"))), folders(root, lines)]


def processes(commands: Iterable[str], address_is_set: bool) -> Finding:
    """commands: command lines of this user's processes. Our own clusters end by themselves."""
    raylets = [line for line in commands if _program(line) == RAYLET and OWN_PREFIX not in line]
    if not raylets:
        return ok("ray.processes", "no cluster of yours runs here")
    value = f"{len(raylets)} raylet{'s' if len(raylets) > 1 else ''} of yours run here"
    if address_is_set and len(raylets) == 1:
        return ok("ray.processes", f"{value}, RAY_ADDRESS is set")
    remedy = (
        "`ray stop` what is stale"
        if len(raylets) > 1
        else "set RAY_ADDRESS (or runtime.address) to join it, or `ray stop` if it is stale"
    )
    return warning("ray.processes", value, remedy)


def folders(root: Path, commands: Iterable[str]) -> Finding:
    """Of clusters that no process names any more: logs and spilled objects fill the disk."""
    named = "\n".join(commands)
    sessions = [*root.glob(f"{OWN_PREFIX}*"), *root.glob("ray/session_2*")]
    dead = [folder for folder in sessions if _is_mine(folder) and str(folder) not in named]
    if not dead:
        return ok("ray.folders", f"no dead session in {root}")
    count = sum(_bytes(folder) for folder in dead)
    value = f"{len(dead)} dead sessions in {root}, {size(count)}"
    if count < MANY_BYTES:
        return ok("ray.folders", value)
    shown = " ".join(map(str, dead[:3])) + (" ..." if len(dead) > 3 else "")
    return warning("ray.folders", value, f"rm -r {shown}")


def _commands_of_mine() -> Iterable[str]:
    mine = os.getuid()
    for process in psutil.process_iter(["uids", "cmdline"]):
        uids, words = process.info["uids"], process.info["cmdline"]
        if uids and uids.real == mine and words:
            yield " ".join(words)


def _program(line: str) -> str:
    return line.partition(" ")[0].rpartition("/")[2]


def _is_mine(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
    except OSError:
        return False


def _bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # gone meanwhile
                continue
    return total
