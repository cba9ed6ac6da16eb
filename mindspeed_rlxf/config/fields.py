"""Base of the sections of the schema: frozen, strict, with documented fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationInfo, model_validator

from mindspeed_rlxf.config.errors import ConfigError, Problem

Resume: TypeAlias = Literal["fixed", "reshard", "free"]
"""Whether a resumed run may change the key: never, with the layout, or freely."""

# Strict mode refuses strings for enums and lists for tuples; these types accept them.
Word = Strict(False)
Strings: TypeAlias = Annotated[tuple[str, ...], Strict(False)]
Integers: TypeAlias = Annotated[tuple[int, ...], Strict(False)]

RULES_LATER = "rules later"
"""Pydantic context that skips `broken_rules`; the caller checks them afterwards."""


class Section(BaseModel):
    """A section of the configuration: immutable, without unknown keys and silent conversion.

    Construction raises ValidationError for `broken_rules`, except in the context RULES_LATER.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    def broken_rules(self) -> Iterator[Problem]:
        """Yield a problem for each broken rule between keys of this section; none here.

        Keys in problems are names of fields.
        """
        yield from ()

    @model_validator(mode="after")
    def _keep_rules(self, info: ValidationInfo) -> Section:
        if info.context != RULES_LATER and (broken := list(self.broken_rules())):
            raise ConfigError(broken)
        return self


def key(default: Any, description: str, resume: Resume = "fixed", **limits: Any) -> Any:
    """Return a pydantic Field: default (`...` = required), meaning for the docs, resume rule.

    limits: of the value, as `ge=1`
    """
    return Field(default, description=description, json_schema_extra={"resume": resume}, **limits)
