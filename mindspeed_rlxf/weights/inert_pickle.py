"""Read pickled data with a stack machine that has no operation that runs anything.

A pickle is a program for a stack machine. Python's machine calls what a pickle names; this one
knows names only as text. It builds plain dicts, lists, tuples, strings and numbers, and an `Inert`
for an object of a listed class (`pickle_names`). There is no import, no call and no attribute of a
Python object in reach of a pickle, and no second reader behind this one.

Every step costs a bounded time and memory: nesting, steps, objects and numbers have limits, a
container is not changed after it has become part of another one (so no data contains itself), and
keys of dicts are values whose hash is quickly found.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any, ClassVar

import torch

from mindspeed_rlxf.weights.pickle_names import (
    ALLOWED,
    ORDERED_DICT,
    SIZE,
    STATES,
    STORAGE_TYPE,
    TENSORS,
    Inert,
    Named,
    Refused,
    Storage,
    attributes_of,
    check_key,
    is_attributes,
    is_fields,
    kind_of,
    named_value,
    shorten,
)
from mindspeed_rlxf.weights.pickle_operations import SCALARS, Operation

MAX_STEPS = 16_000_000  # of one pickle: a sharded folder of 400,000 chunks has these
MAX_CONTAINERS = 6_000_000  # at a time: 200 bytes each, with what is known of it
BETWEEN_CHECKS = 1 << 16  # steps
MAX_DEPTH = 100
MAX_NAME = 200  # characters of module and name

_PLAIN = frozenset((str, int, float, bool, bytes, NoneType, torch.dtype, Named, Storage))


@contextmanager
def no_collections() -> Iterator[None]:
    """Turn the garbage collector off inside the block, which makes many values without cycles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def read_pickle(data: bytes) -> Any:
    """Return the data of a pickle, without running code; objects become `Inert`.

    Raises Refused for a pickle with anything but listed data, ValueError for a damaged one.
    """
    return InertUnpickler(data).load()


class InertUnpickler:
    """Reads one pickle, which must be all of `data`."""

    TABLE: ClassVar[list[Operation]]  # by opcode

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        # Nesting by id, of containers and objects; negative = a part of another one by now.
        self.depth: dict[int, int] = {id(()): -1}

    def load(self) -> Any:
        """Interpret the pickle and return its value; no code of the file is run.

        Raises Refused for anything but listed data, and other ValueErrors for a damaged pickle.
        """
        try:
            with no_collections():
                return self._run()
        except Refused:
            raise
        except (IndexError, struct.error):
            raise ValueError("damaged pickle: it ends early") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"damaged pickle: {shorten(error)}") from None

    def _run(self) -> Any:
        """Interpret one operation after the other until STOP, and return the one value left.

        Raises Refused beyond MAX_STEPS or MAX_CONTAINERS, IndexError without STOP, and errors of
        the operations and of `_final_value`.
        """
        data, table = self.data, self.TABLE
        for _ in range(MAX_STEPS // BETWEEN_CHECKS):
            for _ in range(BETWEEN_CHECKS):
                at = self.at
                self.at = at + 1
                code = data[at]
                if code == STOP:
                    return self._final_value()
                table[code](self)
            if len(self.depth) > MAX_CONTAINERS:
                raise Refused(f"more than {MAX_CONTAINERS} containers and objects")
        raise Refused(f"more than {MAX_STEPS} steps")

    def _final_value(self) -> Any:
        """Return the only value left on the stack.

        Raises ValueError when none or several are left, Refused when data follows the end.
        """
        if self.marks or len(self.stack) != 1:
            raise ValueError("it ends with parts left over")
        if self.at != len(self.data):
            raise Refused("more bytes after its end")
        return self.stack[0]

    def tensor(self, function: str, arguments: tuple[Any, ...]) -> Any:
        """Return the tensor that a function in `TENSORS` would make; here raise Refused.

        A subclass overrides this. arguments: those that the function's test accepted
        """
        raise Refused(f"{function} outside a file of tensors")

    def storage(self, dtype: str, key: str, elements: int) -> Storage:
        """Return the storage of a tensor; here raise Refused. A subclass overrides this.

        dtype: name of the storage's class; key: name of its record; elements: their number
        """
        raise Refused("a tensor's data outside a file of tensors")

    # Of bytes ------------------------------------------------------------------------------------

    def _read_line(self) -> str:
        """Return the text up to the end of its line, without newline, and move after it.

        Raises ValueError without one in MAX_NAME + 1 bytes, and for invalid UTF-8.
        """
        end = self.data.find(b"\n", self.at, self.at + MAX_NAME + 1)
        if end < 0:
            raise ValueError("a name without an end")
        line = self.data[self.at : end]
        self.at = end + 1
        return line.decode("utf-8")

    # Of containers -------------------------------------------------------------------------------

    def _push_new(self, value: Any, depth: int) -> None:
        self.depth[id(value)] = depth
        self.stack.append(value)

    def _hold(self, values: Iterable[Any]) -> int:
        """Mark values as elements of a container, so that they must not change any more.

        Returns the nesting depth of the container. Raises Refused beyond MAX_DEPTH.
        """
        deepest, depths = 0, self.depth
        for value in values:
            if type(value) in _PLAIN:
                continue
            key = id(value)
            depth = depths.get(key, -1)  # a tensor has none
            if depth > 0:
                depths[key] = -depth
            deepest = max(deepest, abs(depth))
        if deepest >= MAX_DEPTH:
            raise Refused(f"more than {MAX_DEPTH} values inside each other")
        return deepest + 1

    def _allow_change(self, target: Any, kind: type, values: Iterable[Any]) -> None:
        """Check that `values` may be added to the container `target`; increase its depth if needed.

        Marks the values with `_hold`; the caller adds them. Raises Refused when `target` is not
        exactly of type `kind`, is among the values, or is already an element of a container.
        """
        if type(target) is not kind:
            raise Refused(f"items or attributes for a {type(target).__name__}")
        key, depth = id(target), self._hold(values)
        before = self.depth[key]
        if before < 0:
            raise Refused("data that contains itself, or changes after it was used")
        self.depth[key] = max(before, depth)

    def _since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def _mark(self) -> None:
        """Put the present stack on `marks` and begin a new, empty one (MARK).

        Raises Refused if there are 2 * MAX_DEPTH marks already.
        """
        if len(self.marks) >= 2 * MAX_DEPTH:
            raise Refused(f"more than {MAX_DEPTH} values inside each other")
        self.marks.append(self.stack)
        self.stack = []

    def _pop(self, count: int) -> list[Any]:
        """Pop the last `count` (1 or more) values of the stack; return them, the top one last.

        Raises IndexError if the stack has fewer.
        """
        items = self.stack[-count:]
        if len(items) < count:
            raise IndexError
        del self.stack[-count:]
        return items

    def _push_tuple(self, items: list[Any]) -> None:
        self._push_new(tuple(items), -self._hold(items))

    def _extend(self, items: list[Any]) -> None:
        self._allow_change(self.stack[-1], list, items)
        self.stack[-1].extend(items)

    def _set_items(self, items: list[Any]) -> None:
        """Add keys and values, alternating in `items`, to the dict on top of the stack (SETITEMS).

        Raises Refused if there is no dict, or it may not be changed any more, and for a repeated or
        unusual key; ValueError for a key without a value.
        """
        target = self.stack[-1]
        self._allow_change(target, dict, items)
        if len(items) % 2:
            raise ValueError("a key without a value")
        for at in range(0, len(items), 2):
            key = items[at]
            if type(key) is not str:
                check_key(key)
            if key in target:
                raise Refused("two entries of one name")
            target[key] = items[at + 1]

    # Of names and objects ------------------------------------------------------------------------

    def _push_global(self) -> None:
        module, name = self._read_line(), self._read_line()
        self.stack.append(named_value(module, name))

    def _replace_global(self) -> None:
        """Replace module and name on the stack by a `Named` or a torch dtype (STACK_GLOBAL).

        Raises Refused for a name that is not listed.
        """
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise Refused("a name that is no text: STACK_GLOBAL requires str")
        self.stack.append(named_value(module, name))

    def _replace_call(self) -> None:
        """Pop arguments and a class or function, and push the value that stands for the call.

        For REDUCE and NEWOBJ. Nothing is called; see `_value_of_call`. Raises Refused for calls of
        other objects, arguments that are no tuple, and what `_value_of_call` refuses.
        """
        arguments, named = self.stack.pop(), self.stack.pop()
        if type(named) is not Named:
            raise Refused(f"a call of {kind_of(named)}")
        if type(arguments) is not tuple:
            raise Refused(f"{named.text} with arguments that are no tuple")
        depth = self._hold(arguments)
        made = self._value_of_call(named.text, arguments)
        kind = type(made)
        if kind is Inert or kind is dict:
            self._push_new(made, depth)
        elif kind is tuple and made:
            self._push_new(made, -depth)
        else:
            self.stack.append(made)

    def _value_of_call(self, text: str, arguments: tuple[Any, ...]) -> Any:
        """Return the value that stands for a call of the name `text`.

        {} for OrderedDict, a tuple for torch.Size, a tensor for the names in TENSORS, bytes for
        _codecs.encode, an Inert with the arguments for other names. Raises Refused for a name that
        is not in ALLOWED or does not accept these arguments.
        """
        accepts = ALLOWED.get(text)
        if accepts is None:
            raise Refused("a storage that is made, not read")
        if not accepts(arguments):
            raise Refused(f"{text} with arguments that no checkpoint gives it")
        if text == ORDERED_DICT:
            return {}
        if text == SIZE:
            return tuple(arguments[0])
        if text in TENSORS:
            return self.tensor(text, arguments)
        if text == "_codecs.encode":  # bytes, as older protocols write them
            return arguments[0].encode("latin1")
        return Inert(text, arguments)

    def _build(self) -> None:
        """Pop a state and store it in the object below it on the stack (BUILD).

        The state of an OrderedDict (a dict here) is only checked. Raises Refused for a class, an
        object that has a state already, objects other than Inert, and states that no checkpoint
        has.
        """
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is Named:
            raise Refused(f"new attributes for the class {target.text}")
        self._allow_change(target, dict if type(target) is dict else Inert, (state,))
        if type(target) is dict:  # of an OrderedDict, as `_metadata` of a model's state
            if not is_fields(state):
                raise Refused("collections.OrderedDict with a state that no checkpoint gives it")
            return
        if target.state is not None or not STATES.get(target.named, is_attributes)(state):
            raise Refused(f"{target.named} with a state that no checkpoint gives it")
        target.state = state if target.named in STATES else attributes_of(state)

    def _replace_reference(self) -> None:
        """Replace a reference to a tensor's data on the stack by its storage (BINPERSID).

        It is ("storage", type, key, device, elements[, view]), as `torch.save` writes it. Raises
        Refused for others.
        """
        pid = self.stack.pop()
        good = type(pid) is tuple and len(pid) in (5, 6) and pid[0] == "storage"
        if not good or [type(part) for part in pid[1:5]] != [Named, str, str, int]:
            raise Refused(f"a reference to something outside, {kind_of(pid)}")
        if not STORAGE_TYPE.fullmatch(pid[1].text) or pid[5:] not in ((), (None,)):
            raise Refused("a reference to something outside")
        self.stack.append(self.storage(pid[1].text.rpartition(".")[2], pid[2], pid[4]))

    def _refuse_opcode(self) -> None:
        raise ValueError(f"the operation {self.data[self.at - 1]:#04x}, which no checkpoint has")


STOP = ord(".")


def _make_table() -> list[Operation]:
    """Return the list of operations by opcode (0 to 255); unknown opcodes raise ValueError.

    Known are those that picklers of protocols 2 to 5 write for data.
    """
    machine = InertUnpickler
    known: dict[str, Operation] = {
        **SCALARS,
        "(": machine._mark,
        "]": lambda m: m._push_new([], 1),
        "}": lambda m: m._push_new({}, 1),
        "\x8f": lambda m: m._push_new([], 1),  # a set, of which nothing is hashed
        "t": lambda m: m._push_tuple(m._since_mark()),
        "\x91": lambda m: m._push_tuple(m._since_mark()),  # a frozenset
        "\x85": lambda m: m._push_tuple(m._pop(1)),
        "\x86": lambda m: m._push_tuple(m._pop(2)),
        "\x87": lambda m: m._push_tuple(m._pop(3)),
        "a": lambda m: m._extend(m._pop(1)),
        "e": lambda m: m._extend(m._since_mark()),
        "\x90": lambda m: m._extend(m._since_mark()),
        "s": lambda m: m._set_items(m._pop(2)),
        "u": lambda m: m._set_items(m._since_mark()),
        "c": machine._push_global,
        "\x93": machine._replace_global,
        "R": machine._replace_call,
        "\x81": machine._replace_call,
        "b": machine._build,
        "Q": machine._replace_reference,
    }
    return [known.get(chr(code), machine._refuse_opcode) for code in range(256)]


InertUnpickler.TABLE = _make_table()
