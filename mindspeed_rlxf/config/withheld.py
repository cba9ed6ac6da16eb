"""Secret variables of the workers, which are used and never written to a file.

Configuration, plan and logs show a placeholder: `${oc.env:NAME}` as the user wrote it, or `***`.
A configuration with `***` takes the variable of the driver, so the file in a run directory starts
the same run again without the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import ValidatorFunctionWrapHandler, WrapValidator

MASK = "***"


class Withheld(str):
    """A placeholder string that carries the secret; copies, pickles and prints show no secret."""

    secret: str

    def __new__(cls, shown: str, secret: str) -> Withheld:
        made = super().__new__(cls, shown)
        made.secret = secret
        return made

    def __deepcopy__(self, _memo: dict[int, Any]) -> Withheld:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def _keep(value: Any, validate: ValidatorFunctionWrapHandler) -> str:
    return value if isinstance(value, Withheld) else str(validate(value))


Variable: TypeAlias = Annotated[str, WrapValidator(_keep)]
"""Type of a worker's variable in the schema: text, or a withheld text."""


def reveal(variables: Mapping[str, str]) -> dict[str, str]:
    """Return all variables with their values, secrets included."""
    return {n: v.secret if isinstance(v, Withheld) else v for n, v in variables.items()}


def open_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are no secrets."""
    return {n: v for n, v in variables.items() if not isinstance(v, Withheld)}


def secret_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the secret variables with their values."""
    return {n: v.secret for n, v in variables.items() if isinstance(v, Withheld)}
