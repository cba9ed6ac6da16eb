"""What every section of the schema is made of: a frozen, strict base and documented fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationInfo, model_validator

from mindspeed_rlxf.config.errors import ConfigError, Problem

Resume: TypeAlias = Literal["fixed", "reshard", "free"]
"""May a resumed run change the key: never, with the layout, or freely."""

# Strict mode refuses what a string or a list stands for; these two are converted all the same.
Word = Strict(False)
Strings: TypeAlias = Annotated[tuple[str, ...], Strict(False)]
Integers: TypeAlias = Annotated[tuple[int, ...], Strict(False)]

RULES_LATER = "rules later"
"""As the context of a validation: types and limits alone; who asks for it judges `broken_rules`."""


class Section(BaseModel):
    """A section of the configuration: written once, no unknown keys, no silent conversion."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    def broken_rules(self) -> Iterator[Problem]:
        """Rules between the section's own keys that it breaks; keys are named as fields here."""
        yield from ()

    @model_validator(mode="after")
    def _keep_rules(self, info: ValidationInfo) -> Section:
        if info.context != RULES_LATER and (broken := list(self.broken_rules())):
            raise ConfigError(broken)
        return self


def key(default: Any, description: str, resume: Resume = "fixed", **limits: Any) -> Any:
    """A field with its default (`...` = required), meaning, resume rule and limits."""
    return Field(default, description=description, json_schema_extra={"resume": resume}, **limits)
