"""Whom a program runs as, and the rights that it gives up before it starts."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

from mindspeed_rlxf.rewards.sandbox import linux
from mindspeed_rlxf.rewards.sandbox.filter import make_filter

NOBODY = 65534


def give_up_rights(uid: int | None) -> None:
    """Become another user, without any capability, behind the filter of system calls."""
    linux.drop_bounding_set()
    become(uid)
    linux.drop_capabilities()
    linux.install_filter(make_filter())


def become(uid: int | None) -> None:
    """Become another user, without groups; None = stay who we are."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def new_user_namespace() -> None:
    """Enter a user namespace in which this user is NOBODY and has every capability."""
    user, group = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        Path(f"/proc/self/{file}").write_text(text, encoding="ascii")


def fresh_uid() -> int:
    """Choose a user id that no process of this host has, from those that this namespace has."""
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    ranges = [[int(part) for part in line.split()] for line in lines]
    first, _, count = max(ranges, key=lambda found: found[2])
    low = first + min(count // 2, 1 << 30)
    high = first + min(count, (1 << 31) - 2) - 1
    if high - low < 1000:
        raise OSError(f"this user namespace has {count} user ids, too few to choose a free one")
    used = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # of a process that has ended
            used.add(os.stat(f"/proc/{name}").st_uid)
    while (uid := random.SystemRandom().randint(low, high)) in used:
        pass
    return uid


def score_for_oom() -> None:
    """Let the kernel choose the program first where the host has no memory left."""
    with contextlib.suppress(OSError):  # without /proc; the limits hold all the same
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
