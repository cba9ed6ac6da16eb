"""Secret environment variables of the workers: they are used, and never written to a file.

Configuration, plan and logs show a placeholder: `${oc.env:NAME}` as the user wrote it, or `***`.
`***` in a configuration means the variable of that name in the driver, so the config.yaml of a run
directory starts the same run again without containing the secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import ValidatorFunctionWrapHandler, WrapValidator

MASK = "***"


class Withheld(str):
    """A placeholder string with the secret as attribute `secret`.

    Printing shows the placeholder. A deep copy is the same object; a pickle is the placeholder
    alone, as plain str.
    """

    secret: str

    def __new__(cls, shown: str, secret: str) -> Withheld:
        made = super().__new__(cls, shown)
        made.secret = secret
        return made

    def __deepcopy__(self, _memo: dict[int, Any]) -> Withheld:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def _keep_withheld(value: Any, validate: ValidatorFunctionWrapHandler) -> str:
    return value if isinstance(value, Withheld) else str(validate(value))


Variable: TypeAlias = Annotated[str, WrapValidator(_keep_withheld)]
"""Pydantic type of a worker's variable: text, or `Withheld`, which stays unchanged."""


def reveal(variables: Mapping[str, str]) -> dict[str, str]:
    """Return all variables with their real values: `Withheld` is replaced by its secret."""
    return {n: v.secret if isinstance(v, Withheld) else v for n, v in variables.items()}


def open_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not `Withheld`."""
    return {n: v for n, v in variables.items() if not isinstance(v, Withheld)}


def secret_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the `Withheld` variables with their secrets."""
    return {n: v.secret for n, v in variables.items() if isinstance(v, Withheld)}
