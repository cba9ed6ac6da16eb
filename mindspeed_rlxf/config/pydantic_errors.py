"""Turn the errors of pydantic into problems."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.config.suggest import closest, format_value


def explain(path: str, errors: Sequence[ErrorDetails], meaning: str = "") -> Problem:
    """Return one problem for all pydantic errors of a key; a union type has several.

    Args:
        meaning: description of the key, the fix unless a similar legal value is found.
    """
    if errors[0]["type"] == "missing":
        remedy = f"add it to the YAML or give {path}=... on the command line"
        return Problem(path, "is required", remedy=remedy)
    rules = [error["msg"].replace("Input should", "must") for error in errors]
    remedy = f"meaning: {meaning}" if meaning else "correct it"
    if (expected := errors[0].get("ctx", {}).get("expected")) and len(errors) == 1:
        words = expected.replace("'", "").replace(" or ", ", ").split(", ")
        if guess := closest(str(errors[0]["input"]).lower(), words):
            remedy = f"did you mean {guess}?"
    rule = " or ".join(dict.fromkeys(rules))
    return Problem(path, rule, format_value(errors[0]["input"]), remedy)


def problems_of(error: ValidationError) -> list[Problem]:
    """Return the problems in the error of one section's model, with keys named as its fields."""
    found: list[Problem] = []
    for detail in error.errors(include_url=False):
        if detail["type"] == "value_error":  # broken rules between its keys
            found += detail["ctx"]["error"].problems
        else:
            found.append(explain(".".join(map(str, detail["loc"])), [detail]))
    return found
