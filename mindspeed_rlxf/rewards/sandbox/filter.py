"""The filter of system calls: no socket, no tracing, no memory that limits do not count.

What a Python program needs is allowed. A refused call returns EPERM. See seccomp(2).
"""

from __future__ import annotations

import errno
import platform
import struct

# Architecture -> (audit number, name and number of each refused system call).
_ARCHITECTURES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
            "memfd_create": 319, "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64,
            "semop": 65, "semctl": 66, "semtimedop": 220, "msgget": 68, "msgsnd": 69,
            "msgrcv": 70, "msgctl": 71, "mq_open": 240, "bpf": 321, "perf_event_open": 298,
            "userfaultfd": 323, "add_key": 248, "request_key": 249, "keyctl": 250,
            "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155,
            "chroot": 161, "kexec_load": 246, "kexec_file_load": 320, "init_module": 175,
            "delete_module": 176, "finit_module": 313, "reboot": 169, "swapon": 167,
            "swapoff": 168, "acct": 163, "quotactl": 179, "syslog": 103, "settimeofday": 164,
            "adjtimex": 159, "clock_settime": 227, "clock_adjtime": 305, "sethostname": 170,
            "setdomainname": 171, "iopl": 172, "ioperm": 173, "modify_ldt": 154,
            "name_to_handle_at": 303, "open_by_handle_at": 304, "fanotify_init": 300,
            "kcmp": 312,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "socket": 198, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
            "memfd_create": 279, "shmget": 194, "shmat": 196, "shmctl": 195, "semget": 190,
            "semop": 193, "semctl": 191, "semtimedop": 192, "msgget": 186, "msgsnd": 189,
            "msgrcv": 188, "msgctl": 187, "mq_open": 180, "bpf": 280, "perf_event_open": 241,
            "userfaultfd": 282, "add_key": 217, "request_key": 218, "keyctl": 219,
            "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41,
            "chroot": 51, "kexec_load": 104, "kexec_file_load": 294, "init_module": 105,
            "delete_module": 106, "finit_module": 273, "reboot": 142, "swapon": 224,
            "swapoff": 225, "acct": 89, "quotactl": 60, "syslog": 116, "settimeofday": 170,
            "adjtimex": 171, "clock_settime": 112, "clock_adjtime": 266, "sethostname": 161,
            "setdomainname": 162, "name_to_handle_at": 264, "open_by_handle_at": 265,
            "fanotify_init": 262, "kcmp": 272,
        },
    ),
}  # fmt: skip
# Newer system calls, which have the same number on all architectures.
_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
}  # fmt: skip
_CLONE3 = 435  # refused because a filter cannot read its flags; the C library falls back to clone
_CLONE = {"x86_64": 56, "aarch64": 220}
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag of clone(2)
_X32 = 0x40000000  # numbers of another table begin here on x86_64

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data


def make_filter(machine: str = "") -> bytes:
    """Return the filter of system calls as a classic BPF program; the caller installs it.

    Refused calls fail with EPERM, clone3 and x32 calls with ENOSYS. A call of another architecture
    kills the process.
    machine: architecture as `platform.machine` names it; "" = this host's

    Raises OSError for an architecture whose numbers of system calls are not known here.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    audit, refused = _ARCHITECTURES[machine]
    code = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, audit, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        *_refuse_if(_AT_LEAST, _X32, errno.ENOSYS),
        *_refuse_if(_EQUAL, _CLONE3, errno.ENOSYS),
    ]
    for number in (*refused.values(), *_EVERYWHERE.values()):
        code += _refuse_if(_EQUAL, number, errno.EPERM)
    code += [
        _step(_EQUAL, _CLONE[machine], 0, 3),
        _step(_LOAD, _FIRST_ARGUMENT),
        *_refuse_if(_ANY_BIT, _NEW_NAMESPACES, errno.EPERM),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _refuse_if(test: int, value: int, code: int) -> list[bytes]:
    return [_step(test, value, 0, 1), _step(_RETURN, _ERROR | code)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
