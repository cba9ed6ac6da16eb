"""The filter of system calls on both architectures, by an interpreter of its own instructions."""

import errno
import struct

import pytest

from mindspeed_rlxf.rewards import system_calls as filters
from mindspeed_rlxf.rewards.system_calls import make_filter

# Number of the call, on x86_64 and on aarch64: what a Python program needs.
NEEDED = {
    "read": (0, 63), "write": (1, 64), "openat": (257, 56), "mmap": (9, 222), "execve": (59, 221),
    "futex": (202, 98), "exit_group": (231, 94), "socketpair": (53, 199), "getrandom": (318, 278),
}  # fmt: skip
ALLOW, KILL = 0x7FFF0000, 0x80000000


def judge(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """Run the filter on one call, as the kernel does (seccomp(2))."""
    data = struct.pack("IIQQ", number & 0xFFFFFFFF, architecture, 0, argument)
    steps = [struct.unpack("HBBI", program[i : i + 8]) for i in range(0, len(program), 8)]
    place, loaded = 0, 0
    while True:
        code, if_true, if_false, value = steps[place]
        place += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (loaded,) = struct.unpack_from("I", data, value)
            continue
        tests = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}
        place += if_true if tests[code] else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_refuses_what_it_lists_and_nothing_that_python_needs(machine: str) -> None:
    program, (audit, clone, refused) = make_filter(machine), filters._ARCHITECTURES[machine]
    for name, number in {**refused, **dict(enumerate(filters._EVERYWHERE))}.items():
        assert judge(program, audit, number) == 0x50000 | errno.EPERM, name
    for name, numbers in NEEDED.items():
        assert judge(program, audit, numbers[machine == "aarch64"]) == ALLOW, name
    assert judge(program, audit, clone, 0x1200011) == ALLOW  # fork
    assert judge(program, audit, clone, 0x3D0F00) == ALLOW  # a thread
    for flag in (0x20000, *(1 << bit for bit in range(25, 31))):
        assert judge(program, audit, clone, flag | 17) == 0x50000 | errno.EPERM
    assert judge(program, audit, 435) == 0x50000 | errno.ENOSYS  # clone3
    assert judge(program, audit, 0x40000000 | 41) == 0x50000 | errno.ENOSYS  # x32
    assert judge(program, 0x40000003, 102) == KILL  # a call of 32 bits


def test_an_architecture_without_a_table_is_refused() -> None:
    with pytest.raises(OSError, match="no table of system calls for riscv64"):
        make_filter("riscv64")
