"""Base class for schema sections: frozen, strict, with documented fields."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic.fields import FieldInfo

from mindspeed_rlxf.config.problems import ConfigError, Problem

Resume: TypeAlias = Literal["fixed", "reshard", "free"]
"""Whether a resumed run may change the key: never, with the layout, or freely."""

# Conditions for keys read in one kind of stage only, see `unused`.
DPO = "training.stage=ray_online_dpo"
NOT_DPO = "training.stage!=ray_online_dpo"

# Strict mode refuses strings for enums and lists for tuples; these types accept them.
Word = Strict(False)
Strings: TypeAlias = Annotated[tuple[str, ...], Strict(False)]
Integers: TypeAlias = Annotated[tuple[int, ...], Strict(False)]


# Paths become absolute, because workers run in other working directories.
FilePath: TypeAlias = Annotated[
    str, AfterValidator(lambda path: os.path.abspath(os.path.expanduser(path)))
]
FilePaths: TypeAlias = Annotated[tuple[FilePath, ...], Strict(False)]


class Section(BaseModel):
    """An immutable configuration section without unknown keys or silent conversion.

    Construction raises ValidationError for `_broken_rules`.

    Attributes:
        section_used_if: Condition without which no key here has an effect (`unused`).
    """

    section_used_if: ClassVar[str] = ""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    def _broken_rules(self) -> Iterator[Problem]:
        """Yield a problem for each broken rule within the section; its keys are field names."""
        yield from ()

    @model_validator(mode="after")
    def _keep_rules(self) -> Section:
        problems = list(self._broken_rules())
        if problems:
            raise ConfigError(problems)
        return self


def extra_of(field: FieldInfo | None) -> dict[str, Any]:
    """Return the `resume`, `used_if` and `only_if` stored in a field by `key`; {} if none."""
    extra = field.json_schema_extra if field is not None else None
    return dict(extra) if isinstance(extra, dict) else {}


def key(
    default: Any,
    description: str,
    resume: Resume = "fixed",
    used_if: str = "",
    only_if: str = "",
    **limits: Any,
) -> Any:
    """Return a pydantic Field with a description and a resume rule.

    Args:
        default: The default; `...` = required.
        description: The meaning, for docs and messages.
        resume: Whether a resumed run may change the key.
        used_if: Condition without which the key has no effect, which is noted (see `unused`).
        only_if: The same, but a value other than the default is an error.
        **limits: Limits such as `ge=1`.
    """
    extra: dict[str, Any] = {"resume": resume, "used_if": used_if, "only_if": only_if}
    return Field(default, description=description, json_schema_extra=extra, **limits)


# `key` with a resume rule.
free = partial(key, resume="free")
reshard = partial(key, resume="reshard")
