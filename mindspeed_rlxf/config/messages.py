"""Turn pydantic's errors into problems: key, value, rule, remedy."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.config.suggest import closest, format_value

TYPES = {
    "int": ("must be an integer", "write a whole number without quotes"),
    "float": ("must be a number", "write a number such as 0.1 without quotes"),
    "bool": ("must be true or false", "write true or false without quotes"),
    "string": ("must be text", "put it in quotes"),
    "tuple": ("must be a list", "write [a, b]"),
    "list": ("must be a list", "write [a, b]"),
    "dict": ("must be a section of keys", "write `key: value` lines under it"),
    "model": ("must be a section of keys", "write `key: value` lines under it"),
    "finite": ("must be finite", "write an ordinary number"),
}
LIMITS = {
    "ge": ("must be at least {:.15g}", "use {:.15g} or more"),
    "gt": ("must be greater than {:.15g}", "use more than {:.15g}"),
    "le": ("must be at most {:.15g}", "use {:.15g} or less"),
    "lt": ("must be less than {:.15g}", "use less than {:.15g}"),
}


def explain(path: str, errors: list[ErrorDetails]) -> Problem:
    """Return one problem for all pydantic errors of the key `path`; a union type has several.

    For a missing key: `is required`. Else the rules of all errors joined with "or", the value, and
    the remedy of the first error.
    """
    if errors[0]["type"] == "missing":
        return Problem(
            path, "is required", remedy=f"add it to the YAML or give {path}=... on the command line"
        )
    rules, remedies = zip(*map(_rule, errors), strict=True)
    return Problem(
        path,
        " or ".join(dict.fromkeys(rules)).replace(" or must be ", " or "),
        format_value(errors[0]["input"]),
        remedies[0],
    )


def problems_of(error: ValidationError) -> list[Problem]:
    """Return the problems in the error of one section's model, with keys named as its fields."""
    return [
        problem
        for detail in error.errors(include_url=False)
        for problem in (
            detail["ctx"]["error"].problems  # broken rules between its keys
            if detail["type"] == "value_error"
            else [explain(".".join(map(str, detail["loc"])), [detail])]
        )
    ]


def _rule(error: ErrorDetails) -> tuple[str, str]:
    """Return (rule, remedy) for one error of pydantic.

    For words of an enum or literal the remedy is the most similar one, else the first; then texts
    of LIMITS, of an empty text, of TYPES; else pydantic's message.
    """
    context: dict[str, Any] = error.get("ctx", {})
    kind = error["type"]
    if kind in ("enum", "literal_error"):
        words = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        guess = closest(str(error["input"]).lower(), words)
        rule = f"must be {'one of ' if len(words) > 1 else ''}{', '.join(words)}"
        return rule, f"did you mean {guess}?" if guess else f"use {words[0]}"
    for limit, (rule, remedy) in LIMITS.items():
        if limit in context:
            return rule.format(context[limit]), remedy.format(context[limit])
    if kind == "string_too_short":
        return "must not be empty", "give a name"
    return TYPES.get(kind.split("_")[0], (f"is not valid ({error['msg']})", "correct it"))
