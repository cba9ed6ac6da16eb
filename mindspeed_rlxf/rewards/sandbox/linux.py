"""System calls that Python has no function for, and rights that a process gives up for good."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 0x1, 0x2, 0x4, 0x20
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
_SECCOMP_MODE_FILTER, _CAP_AMBIENT_CLEAR_ALL = 2, 4
_CAPABILITY_VERSION_3 = 0x20080522
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _call_libc(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError where it returns -1."""
    if getattr(_libc, name)(*arguments) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _prctl(option: int, *arguments: int) -> None:
    padded = (*arguments, 0, 0, 0, 0)[:4]
    _call_libc("prctl", ctypes.c_int(option), *map(ctypes.c_ulong, padded))


def unshare(flags: int) -> None:
    """Move this process into new namespaces (unshare(2)). Raises OSError."""
    _call_libc("unshare", ctypes.c_int(flags))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system (mount(2)). kind: its type; "" = none. Raises OSError."""
    _call_libc(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )


def pivot_root_here() -> None:
    """Make the current directory, a mount point, the root; unmount the old root (pivot_root(2)).

    The current directory becomes "/". Raises OSError.
    """
    number = _PIVOT_ROOT[platform.machine()]
    _call_libc("syscall", ctypes.c_long(number), b".", b".")
    _call_libc("umount2", b".", ctypes.c_int(MNT_DETACH))
    os.chdir("/")


def become_subreaper() -> None:
    """Make this process the parent of descendants whose own parent ends, in any session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal: int, parent: int) -> None:
    """Let the kernel send `signal` to this process when its parent ends.

    Exits at once with status 1 if the parent is not process `parent`, because it has ended already.
    """
    _prctl(_PR_SET_PDEATHSIG, signal)
    if os.getppid() != parent:
        os._exit(1)


def allow_tracing(allowed: bool) -> None:
    """Set whether this user's processes may trace this one and open all its files in /proc."""
    _prctl(_PR_SET_DUMPABLE, int(allowed))


def drop_bounding_set() -> None:
    """Remove every capability from the bounding set of this process, for good.

    Does nothing without the capability CAP_SETPCAP.
    """
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:  # past the last capability, or no right to drop
            return


def drop_capabilities() -> None:
    """Give up all capabilities, and set no_new_privs: no program that is started gets any either.

    Clears the effective, permitted, inheritable and ambient sets of the calling thread. Raises
    OSError if the kernel refuses; it may have no ambient set.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    with contextlib.suppress(OSError):  # of a kernel without ambient capabilities
        _prctl(_PR_CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL)
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    _call_libc("capset", header, ctypes.create_string_buffer(24))


def install_filter(program: bytes) -> None:
    """Install a filter of system calls (`filter.make_filter`) in this process, for good.

    Needs no_new_privs or CAP_SYS_ADMIN. Raises OSError.
    """
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    held = ctypes.create_string_buffer(header, len(header))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(held))
