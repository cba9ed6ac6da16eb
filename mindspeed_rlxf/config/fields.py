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
"""Context of a validation that checks types and limits only; the caller checks `broken_rules`."""


class Section(BaseModel):
    """A section of the configuration: written once, no unknown keys, no silent conversion."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    def broken_rules(self) -> Iterator[Problem]:
        """Yield broken rules between keys of this section; keys are named as fields."""
        yield from ()

    @model_validator(mode="after")
    def _keep_rules(self, info: ValidationInfo) -> Section:
        if info.context != RULES_LATER and (broken := list(self.broken_rules())):
            raise ConfigError(broken)
        return self


def key(default: Any, description: str, resume: Resume = "fixed", **limits: Any) -> Any:
    """Define a field: default (`...` = required), meaning, resume rule and limits."""
    return Field(default, description=description, json_schema_extra={"resume": resume}, **limits)
