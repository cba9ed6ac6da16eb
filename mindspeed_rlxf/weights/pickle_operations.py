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


def _push_constant(value: Any) -> Operation:
    return lambda machine: machine.stack.append(value)


def _push_unsigned(size: int) -> Operation:
    return lambda machine: machine.stack.append(number(machine, size))


def _push_signed(machine: Machine) -> None:
    machine.stack.append(int.from_bytes(take(machine, 4), "little", signed=True))


def _push_long(machine: Machine) -> None:
    """Push the signed integer whose length in bytes is one byte before it (LONG1).

    Raises Refused for more than MAX_NUMBER_BYTES.
    """
    size = number(machine, 1)
    if size > MAX_NUMBER_BYTES:
        raise Refused(f"an integer of {size} bytes")
    machine.stack.append(int.from_bytes(take(machine, size), "little", signed=True))


def _push_float(machine: Machine) -> None:
    machine.stack.append(struct.unpack(">d", take(machine, 8))[0])


def _push_text(size: int) -> Operation:
    return lambda machine: machine.stack.append(str(_bytes_of(machine, size), "utf-8"))


def _push_bytes(size: int) -> Operation:
    return lambda machine: machine.stack.append(_bytes_of(machine, size))


def _push_short_text(machine: Machine) -> None:
    """Push the UTF-8 text at the machine's position, whose first byte is the text's length.

    Moves the position after it. Raises IndexError if the data end first. Repeats the code of
    `_push_text` and `take`, as it is the most frequent operation.
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


def _read_index(machine: Machine) -> int:
    at = machine.at
    machine.at = at + 4
    return INDEX.unpack_from(machine.data, at)[0]  # type: ignore[no-any-return]


def _store(machine: Machine) -> None:
    _remember(machine, _read_index(machine))


def _store_short(machine: Machine) -> None:
    at = machine.at
    machine.at = at + 1
    _remember(machine, machine.data[at])


def _push_stored(machine: Machine) -> None:
    machine.stack.append(machine.memo[_read_index(machine)])


def _push_stored_short(machine: Machine) -> None:
    at = machine.at
    machine.at = at + 1
    machine.stack.append(machine.memo[machine.data[at]])


def _push_byte(machine: Machine) -> None:
    at = machine.at
    machine.at = at + 1
    machine.stack.append(machine.data[at])


def _check_protocol(machine: Machine) -> None:
    if number(machine, 1) not in (2, 3, 4, 5) or machine.at != 2:
        raise ValueError("its protocol is none of 2 to 5")


def _check_frame(machine: Machine) -> None:
    if number(machine, 8) > len(machine.data) - machine.at:
        raise IndexError


SCALARS: dict[str, Operation] = {
    "\x80": _check_protocol,
    "\x95": _check_frame,
    "N": _push_constant(None),
    "\x88": _push_constant(True),
    "\x89": _push_constant(False),
    "K": _push_byte,
    "M": _push_unsigned(2),
    "J": _push_signed,
    "\x8a": _push_long,
    "G": _push_float,
    "\x8c": _push_short_text,
    "X": _push_text(4),
    "\x8d": _push_text(8),
    "C": _push_bytes(1),
    "B": _push_bytes(4),
    "\x8e": _push_bytes(8),
    "\x96": _push_bytes(8),  # a bytearray
    ")": _push_constant(()),
    "h": _push_stored_short,
    "j": _push_stored,
    "\x94": lambda machine: _remember(machine, len(machine.memo)),
    "q": _store_short,
    "r": _store,
}
"""By opcode; the empty tuple, of which there is one, is among them."""
