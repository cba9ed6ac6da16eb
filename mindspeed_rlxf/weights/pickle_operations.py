"""Operations of a pickle on numbers, text, bytes and the memo.

At the end of the data an operation gets fewer bytes than it asks for, and the next one fails. So no
memory is allocated for a length that a file claims and does not have.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Protocol

from mindspeed_rlxf.weights.pickle_names import Refused

INDEX = struct.Struct("<I")  # of the memo
MAX_NUMBER_BYTES = 64  # of an integer; random streams of numpy have 16


class Machine(Protocol):
    """State of the reader of a pickle. at: index of the next byte of `data`"""

    data: bytes
    at: int
    stack: list[Any]
    memo: dict[int, Any]


Operation = Callable[[Any], None]
"""Called with a `Machine`."""


def take(machine: Machine, count: int) -> bytes:
    start = machine.at
    machine.at = end = start + count
    return machine.data[start:end]


def number(machine: Machine, size: int) -> int:
    start = machine.at
    machine.at = end = start + size
    return int.from_bytes(machine.data[start:end], "little")


def _bytes_of(machine: Machine, size: int) -> bytes:
    """Read a length of `size` bytes, then return that many bytes (fewer at the end of the data)."""
    return take(machine, number(machine, size))


def _push(value: Any) -> Operation:
    return lambda machine: machine.stack.append(value)


def _little(size: int) -> Operation:
    return lambda machine: machine.stack.append(number(machine, size))


def _signed(machine: Machine) -> None:
    machine.stack.append(int.from_bytes(take(machine, 4), "little", signed=True))


def _long(machine: Machine) -> None:
    """Push an integer whose length is one byte before it (LONG1). Raises Refused for a huge one."""
    size = number(machine, 1)
    if size > MAX_NUMBER_BYTES:
        raise Refused(f"an integer of {size} bytes")
    machine.stack.append(int.from_bytes(take(machine, size), "little", signed=True))


def _float(machine: Machine) -> None:
    machine.stack.append(struct.unpack(">d", take(machine, 8))[0])


def _text(size: int) -> Operation:
    return lambda machine: machine.stack.append(str(_bytes_of(machine, size), "utf-8"))


def _bytes(size: int) -> Operation:
    return lambda machine: machine.stack.append(_bytes_of(machine, size))


def _short_text(machine: Machine) -> None:
    """Push text whose length is one byte before it.

    Repeats the code of `_text` and `take`, as it is the most frequent operation.
    """
    start = machine.at + 1
    end = start + machine.data[start - 1]
    if end > len(machine.data):
        raise IndexError
    machine.at = end
    machine.stack.append(str(machine.data[start:end], "utf-8"))


def _remember(machine: Machine, index: int) -> None:
    if index in machine.memo:
        raise Refused("a value that is remembered in place of another")
    machine.memo[index] = machine.stack[-1]


def _index(machine: Machine) -> int:
    at = machine.at
    machine.at = at + 4
    return INDEX.unpack_from(machine.data, at)[0]  # type: ignore[no-any-return]


def _put(machine: Machine) -> None:
    _remember(machine, _index(machine))


def _put_short(machine: Machine) -> None:
    at = machine.at
    machine.at = at + 1
    _remember(machine, machine.data[at])


def _get(machine: Machine) -> None:
    machine.stack.append(machine.memo[_index(machine)])


def _get_short(machine: Machine) -> None:
    at = machine.at
    machine.at = at + 1
    machine.stack.append(machine.memo[machine.data[at]])


def _byte(machine: Machine) -> None:
    at = machine.at
    machine.at = at + 1
    machine.stack.append(machine.data[at])


def _protocol(machine: Machine) -> None:
    if number(machine, 1) not in (2, 3, 4, 5) or machine.at != 2:
        raise ValueError("its protocol is none of 2 to 5")


def _frame(machine: Machine) -> None:
    if number(machine, 8) > len(machine.data) - machine.at:
        raise IndexError


SCALARS: dict[str, Operation] = {
    "\x80": _protocol,
    "\x95": _frame,
    "N": _push(None),
    "\x88": _push(True),
    "\x89": _push(False),
    "K": _byte,
    "M": _little(2),
    "J": _signed,
    "\x8a": _long,
    "G": _float,
    "\x8c": _short_text,
    "X": _text(4),
    "\x8d": _text(8),
    "C": _bytes(1),
    "B": _bytes(4),
    "\x8e": _bytes(8),
    "\x96": _bytes(8),  # a bytearray
    ")": _push(()),
    "h": _get_short,
    "j": _get,
    "\x94": lambda machine: _remember(machine, len(machine.memo)),
    "q": _put_short,
    "r": _put,
}
"""By opcode; the empty tuple, of which there is one, is among them."""
