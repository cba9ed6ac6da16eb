"""Values that are used and never written down: secrets among the variables of the workers.

In configuration, plan and logs such a value is the text that stands for it: `${oc.env:NAME}` as
the user wrote it, or `***`. A configuration that says `***` takes the variable of the driver, so
the file in a run directory starts the same run again without having the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import ValidatorFunctionWrapHandler, WrapValidator

MASK = "***"


class Withheld(str):
    """Reads as what stands for the value, wherever it is shown, compared or sent."""

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
"""Of the workers, in the schema: text, or text that is withheld."""


def reveal(variables: Mapping[str, str]) -> dict[str, str]:
    """All variables with their values."""
    return {n: v.secret if isinstance(v, Withheld) else v for n, v in variables.items()}


def open_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Those whose values may be seen."""
    return {n: v for n, v in variables.items() if not isinstance(v, Withheld)}


def secret_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The others, with their values."""
    return {n: v.secret for n, v in variables.items() if isinstance(v, Withheld)}
