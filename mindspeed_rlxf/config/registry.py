"""Register parts, such as estimators, under the name that the configuration uses."""

from typing import TypeVar

T = TypeVar("T")


def register_part(registry: dict[str, T], name: str, part: T, what: str) -> None:
    """Put `part` into `registry` under `name`, in place. Errors: ValueError for a name in use.

    what: kind of part, for the message, which lists all names in use
    """
    if name in registry:
        taken = ", ".join(sorted(registry))
        raise ValueError(f"{what} {name!r} is registered already; use a name other than {taken}")
    registry[name] = part
