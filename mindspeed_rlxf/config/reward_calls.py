"""How a reward function is named, and with what it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

GIVEN = ("prompt", "response", "ground_truth", "extra_info")
"""Keyword arguments of every call."""
DATA_SOURCE = "data_source"
"""Given to the functions that have a parameter of this name."""
BY_SOURCE = "rule"
"""Name of the function that is the rule of the data source."""
RULES_OF_PROGRAMS = frozenset({"code", "code_all"})
"""Names of the rules that run programs of responses in a sandbox."""


def split_name(function: str) -> tuple[str, str] | None:
    """Split `path/to/file.py:name`; None where the text names no file."""
    path, colon, name = function.rpartition(":")
    return (path, name) if colon and path.endswith(".py") else None


def find_function(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return a function of the module, or of a class in it (`Class.method`).

    Raises ValueError that names what is there.
    """
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if inspect.isclass(found):
        raise ValueError(f"must be a function, {name} is a class: name one of its static methods")
    if callable(found):
        return found  # type: ignore[no-any-return]
    own = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
    raise ValueError(f"the file must have a function {name}; it has {', '.join(own) or 'none'}")


def keywords_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names that the function is called with, without its own arguments."""
    takes = DATA_SOURCE in inspect.signature(function).parameters
    return (*GIVEN, DATA_SOURCE) if takes else GIVEN


def find_broken_rule(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """Return why the function cannot be called as rewards are, None where it can."""
    if taken := _overlap(arguments, (*GIVEN, DATA_SOURCE)):
        return f"arguments must not have {', '.join(taken)}, which the run gives"
    try:
        signature = inspect.signature(function)
        signature.bind(**dict.fromkeys((*keywords_of(function), *arguments)))
    except (TypeError, ValueError) as error:
        wanted = ", ".join((*GIVEN, *arguments))
        return f"must be a function of ({wanted}), called by keyword: {error}"
    return None


def _overlap(first: Collection[str], second: Collection[str]) -> list[str]:
    return sorted(set(first) & set(second))
