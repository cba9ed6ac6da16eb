"""Build the root of a program's mount namespace: read-only folders, and one to write in."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable

from mindspeed_rlxf.rewards.sandbox import linux
from mindspeed_rlxf.rewards.sandbox.view import DEVICES, LIBRARY_CACHE, PROGRAM, SCRATCH

_AT = "/tmp"  # the new root is built over this folder, which the program does not see
_KEPT = {
    os.ST_NOSUID: linux.MS_NOSUID,
    os.ST_NODEV: linux.MS_NODEV,
    os.ST_NOEXEC: 0x8,
    os.ST_NOATIME: 0x400,
    os.ST_NODIRATIME: 0x800,
    os.ST_RELATIME: 0x200000,
}
"""Flag of statvfs(3) -> flag of mount(2); a remount in a user namespace must not clear it."""


def build_root(folders: Iterable[str], program: bytes, scratch: str) -> None:
    """Replace the root of this process's mount namespace; the old root cannot be reached any more.

    The new root also has DEVICES, LIBRARY_CACHE, and /dev/shm as a link to SCRATCH.

    folders: mounted read-only at the same path in the new root; a link stays a link, and a path
             that does not exist is left out
    program: content of the file PROGRAM
    scratch: mount options of the writable tmpfs at SCRATCH
    Raises OSError.
    """
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    shown = [*folders, LIBRARY_CACHE]
    links = {path: os.readlink(path) for path in shown if os.path.islink(path)}
    devices = [f"/dev/{name}" for name in DEVICES]
    plain = [path for path in shown if path not in links and os.path.exists(path)]
    # Opened before the new root hides them.
    opened = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (*plain, *devices)}
    linux.mount("root", _AT, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=4m")
    for path, descriptor in opened.items():
        _bind_read_only(path, descriptor, path in devices)
    for path, target in links.items():
        os.symlink(target, _AT + path)
    os.symlink(SCRATCH, f"{_AT}/dev/shm")
    os.makedirs(os.path.dirname(_AT + PROGRAM))
    with open(_AT + PROGRAM, "wb") as file:
        file.write(program)
    os.makedirs(_AT + SCRATCH)
    linux.mount("scratch", _AT + SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, scratch)
    _remount(_AT, linux.MS_NOSUID | linux.MS_NODEV | linux.MS_RDONLY)
    os.chdir(_AT)
    linux.pivot_root_here()


def _bind_read_only(path: str, descriptor: int, device: bool) -> None:
    """Bind-mount a file or folder, and all mounts below it, read-only at its path in the new root.

    descriptor: of the file or folder; closed afterwards. device: device nodes stay usable
    """
    target = _AT + path
    if os.path.isdir(f"/proc/self/fd/{descriptor}"):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    linux.mount(f"/proc/self/fd/{descriptor}", target, flags=linux.MS_BIND | linux.MS_REC)
    os.close(descriptor)
    target = os.path.realpath(target)  # as the kernel names it, if /tmp is a link
    points = _mounted_below(target)
    if target not in points:
        raise OSError(errno.ENOENT, f"{target} must be a mount point, so that it is made read-only")
    for point in points:
        flags = linux.MS_NOSUID | (0 if device else linux.MS_NODEV)
        _remount(point, flags | linux.MS_RDONLY)


def _remount(point: str, flags: int) -> None:
    set_flags = os.statvfs(point).f_flag
    kept = sum(flag for bit, flag in _KEPT.items() if set_flags & bit)
    linux.mount("none", point, flags=linux.MS_BIND | linux.MS_REMOUNT | kept | flags)


def _mounted_below(target: str) -> list[str]:
    """List this process's mount points at and below a path."""
    with open("/proc/self/mountinfo", "rb") as file:
        points = [line.split(b" ")[4] for line in file.read().split(b"\n") if line]
    # The kernel writes space, tab, line feed and backslash as octal numbers.
    plain = [
        os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), point))
        for point in points
    ]
    return [point for point in plain if point == target or point.startswith(f"{target}/")]
