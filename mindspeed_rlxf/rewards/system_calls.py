"""The sandbox's system call filter, a classic BPF program; see seccomp(2).

It refuses sockets, new namespaces, tracing, rarely used kernel features, and memory outside all
limits. Python programs need none of them.
"""

import errno
import platform
import struct

# Architecture -> (audit number, number of clone, numbers of refused system calls).
_ARCHITECTURES: dict[str, tuple[int, int, dict[str, int]]] = {
    "x86_64": (0xC000003E, 56, {
        "socket": 41, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
        "memfd_create": 319, "shmget": 29, "shmat": 30, "semget": 64, "msgget": 68,
        "mq_open": 240, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "add_key": 248,
        "request_key": 249, "keyctl": 250, "unshare": 272, "setns": 308, "kcmp": 312,
        "modify_ldt": 154, "name_to_handle_at": 303, "open_by_handle_at": 304,
    }),
    "aarch64": (0xC00000B7, 220, {
        "socket": 198, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
        "memfd_create": 279, "shmget": 194, "shmat": 196, "semget": 190, "msgget": 186,
        "mq_open": 180, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "add_key": 217,
        "request_key": 218, "keyctl": 219, "unshare": 97, "setns": 268, "kcmp": 272,
        "name_to_handle_at": 264, "open_by_handle_at": 265,
    }),
}  # fmt: skip
# io_uring (3), open_tree to fspick (6), pidfd_getfd, mount_setattr, memfd_secret: on all machines
_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
_CLONE3 = 435  # refused because a filter cannot read its flags; the C library falls back to clone
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag of clone(2)
_X32 = 0x40000000  # numbers of another table begin here on x86_64

# Instructions of the classic BPF machine.
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
# What a filter may return.
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERROR = 0x00050000
# Offsets in seccomp_data.
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16


def make_filter(machine: str = "") -> bytes:
    """Return the filter for an architecture named as by `platform.machine`; "" = this host.

    Raises:
        OSError: The architecture's system call numbers are unknown.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    audit, clone, refused = _ARCHITECTURES[machine]
    code = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, audit, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        *_refuse_if(_AT_LEAST, _X32, errno.ENOSYS),
        *_refuse_if(_EQUAL, _CLONE3, errno.ENOSYS),
    ]
    for number in (*refused.values(), *_EVERYWHERE):
        code += _refuse_if(_EQUAL, number, errno.EPERM)
    code += [
        _step(_EQUAL, clone, 0, 3),
        _step(_LOAD, _FIRST_ARGUMENT),
        *_refuse_if(_ANY_BIT, _NEW_NAMESPACES, errno.EPERM),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _refuse_if(test: int, value: int, code: int) -> list[bytes]:
    return [_step(test, value, 0, 1), _step(_RETURN, _ERROR | code)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
