"""Register parts, such as estimators, under their configuration names."""

from typing import TypeVar

T = TypeVar("T")


def register_part(registry: dict[str, T], name: str, part: T, what: str) -> None:
    """Put `part` into `registry` under `name`, in place.

    Args:
        registry: Registered parts by name.
        name: The name in the configuration.
        part: The part.
        what: Kind of part, for the message.

    Raises:
        ValueError: The name is in use.
    """
    if name in registry:
        taken = ", ".join(sorted(registry))
        raise ValueError(f"{what} {name!r} is registered already; use a name other than {taken}")
    registry[name] = part
