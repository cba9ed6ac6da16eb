"""What a pickle may have as a name, a key, or attributes, and how a message shows any of it."""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch

from mindspeed_rlxf.weights.pickle_names import ALLOWED, STORAGE_TYPE, Inert, Named

MAX_KEY_PARTS = 8
MAX_KEY_NUMBER = 1 << 48
SHOWN = 120  # characters of a stranger's text in a message

_KEYS = frozenset((str, bool, bytes, NoneType, torch.dtype, Named, Inert))


class Refused(ValueError):
    """A pickle that wants more than data, or more of it than is read."""


def shown(text: object) -> str:
    """A stranger's text as a message may have it: short, without control characters."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text)[:SHOWN])


def kind_of(value: Any) -> str:
    """Of a value whose content may be large or without end."""
    if type(value) is Inert:
        return f"what {value.named} returns"
    return shown(value) if type(value) in (str, int) else f"a {type(value).__name__}"


def named_value(module: str, name: str) -> Any:
    """A name on the list, or the dtype of that name."""
    text = f"{module}.{name}"
    known = _NAMES.get(text)
    if known is None:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if text not in ALLOWED and not STORAGE_TYPE.fullmatch(text):
            raise Refused(shown(text))
        known = _NAMES.setdefault(text, Named(text))
    return known


_NAMES: dict[str, Named] = {}  # as many as the list has


def attributes_of(state: Any) -> dict[str, Any]:
    """By name: of the object, and of its slots where a pair of both is given."""
    if type(state) is dict:
        return state
    pair = state if type(state) is tuple else (state, None)
    first, second = (part or {} for part in pair)
    if first.keys() & second.keys():
        raise Refused("an object with two attributes of one name")
    return {**first, **second}


def check_key(key: Any) -> None:
    """Keys are hashed and compared: only values for which that is quickly done."""
    for part in key if type(key) is tuple and len(key) <= MAX_KEY_PARTS else (key,):
        small = type(part) is int and abs(part) < MAX_KEY_NUMBER
        if not small and type(part) not in _KEYS and type(part) is not str:
            raise Refused(f"a key that is {kind_of(part)}")
