"""The user that a program runs as, and the rights that it gives up before it starts."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

from mindspeed_rlxf.rewards.sandbox import linux
from mindspeed_rlxf.rewards.sandbox.filter import make_filter

NOBODY = 65534


def give_up_rights(uid: int | None) -> None:
    """Change this process's user, drop all capabilities and install the filter of system calls.

    Cannot be undone. uid: the user, None = keep this one. Raises OSError.
    """
    linux.drop_bounding_set()
    become(uid)
    linux.drop_capabilities()
    linux.install_filter(make_filter())


def become(uid: int | None) -> None:
    """Change this process's user and group to `uid`, without other groups; None = change nothing.

    Raises OSError without the right.
    """
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def new_user_namespace() -> None:
    """Move this process into a new user namespace, in which it is NOBODY with all capabilities.

    Raises OSError where user namespaces are not allowed.
    """
    user, group = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        Path(f"/proc/self/{file}").write_text(text, encoding="ascii")


def fresh_uid() -> int:
    """Return a random user id of this user namespace that no process in /proc uses.

    Chosen from the upper half of the largest range of ids, or from 2^30 above its start. Does not
    reserve the id. Raises OSError if there are not more than 1000 to choose from.
    """
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    ranges = [[int(part) for part in line.split()] for line in lines]
    first, _, count = max(ranges, key=lambda each: each[2])
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


def raise_oom_score() -> None:
    """Make the kernel kill this process first when the host runs out of memory.

    Children inherit this. Does nothing where the kernel refuses or /proc is missing.
    """
    with contextlib.suppress(OSError):  # no /proc; the limits still apply
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
