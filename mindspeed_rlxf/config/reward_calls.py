"""Names of reward functions in the YAML, and the arguments of their calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

GIVEN = ("prompt", "response", "ground_truth", "extra_info")
"""Keyword arguments of every call."""
DATA_SOURCE = "data_source"
"""Further keyword argument, of functions that have a parameter of this name."""
BY_SOURCE = "rule"
"""Word in place of a function for the rule that belongs to the sample's data source."""
RULES_OF_PROGRAMS = frozenset({"code", "code_all"})
"""Names of the rules that run programs of responses in a sandbox."""


def split_name(function: str) -> tuple[str, str] | None:
    """Split `path/to/file.py:name` at the last colon; return (path, name). Name may be empty.

    None for text without a colon, or where the path does not end with `.py`.
    """
    path, colon, name = function.rpartition(":")
    return (path, name) if colon and path.endswith(".py") else None


def find_function(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return the function `name`, or the static method `Class.method`, of the module.

    Anything callable but a class will do.
    Errors: ValueError for a class, and for a name that is missing or not callable (the message
    lists the module's functions without leading `_`).
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
    """Return the names of the keyword arguments that the run passes to this function.

    GIVEN, then `data_source` if the function has a parameter of that very name (`**kwargs` does not
    count). The YAML's `arguments` are not included.
    """
    takes = DATA_SOURCE in inspect.signature(function).parameters
    return (*GIVEN, DATA_SOURCE) if takes else GIVEN


def find_broken_rule(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """Return the rule that a reward function breaks, as text for a problem; None if it is legal.

    It must accept GIVEN and `arguments` as keywords, by its signature. It is not called.
    arguments: of the YAML; they must not have a name in GIVEN, nor `data_source`
    """
    if taken := _overlap(arguments, (*GIVEN, DATA_SOURCE)):
        return f"arguments must not have {', '.join(taken)}, which the run gives"
    try:
        signature = inspect.signature(function)
        signature.bind(**dict.fromkeys((*keywords_of(function), *arguments)))
    except (TypeError, ValueError) as error:
        wanted = ", ".join((*GIVEN, *map(str, arguments)))
        return f"must be a function of ({wanted}), called by keyword: {error}"
    return None


def _overlap(first: Collection[str], second: Collection[str]) -> list[str]:
    return sorted(set(first) & set(second))
