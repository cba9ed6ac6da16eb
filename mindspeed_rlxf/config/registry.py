"""Register components, such as estimators, under their configuration names."""

from collections.abc import Callable
from typing import Annotated, TypeAlias, TypeVar

from pydantic import AfterValidator, ValidationInfo
from pydantic_core import PydanticCustomError

T = TypeVar("T")

CHOICES: dict[str, list[str]] = {
    "backend": ["megatron", "fsdp"],
    "policy_loss": ["ppo", "gspo", "geo_mean", "cispo", "gpg", "dis", "clip_cov", "kl_cov"],
    "objective": [],
}
"""Key -> its values, those of plugins included; the components are registered elsewhere."""


def _check_choice(value: str, info: ValidationInfo) -> str:
    choices = CHOICES[str(info.field_name)]
    if value not in choices:
        expected = ", ".join(choices) or "a name that a plugin registers"
        raise PydanticCustomError("enum", "no such choice", {"expected": expected})
    return value


Choice: TypeAlias = Annotated[str, AfterValidator(_check_choice)]
"""A value in CHOICES."""


def add_to(registry: dict[str, T], name: str, kind: str, choice: str = "") -> Callable[[T], T]:
    """Return a decorator that puts a component into `registry`, and its name into CHOICES.

    Args:
        registry: Registered components by name.
        name: The name in the configuration; decorating raises ValueError if it is in use.
        kind: Kind of component, for the message.
        choice: Key in CHOICES; "" for none.
    """

    def register(component: T) -> T:
        if name in registry:
            remedy = f"use a name other than {', '.join(sorted(registry))}"
            raise ValueError(f"{kind} {name!r} is registered already; {remedy}")
        registry[name] = component
        if choice:
            CHOICES[choice].append(name)
        return component

    return register
