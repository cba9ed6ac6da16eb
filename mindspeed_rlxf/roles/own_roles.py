"""Role classes of the user, which replace ours on the devices."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.plugins import MODULES

T = TypeVar("T", bound=type)
OWN_ROLES: dict[Role, type] = {}
"""Role -> the class in place of ours, mostly a subclass of it."""


def register_role(role: Role) -> Callable[[T], T]:
    """Return a decorator that puts a class in place of ours; the last one registered counts.

    Driver and workers call its methods by the names of our class, with the same arguments.
    """

    def register(own: T) -> T:
        OWN_ROLES[role] = own
        return own

    return register


def role_factory(role: Role, ours: type) -> Callable[..., Any]:
    """Return what builds a role in its workers: our class, or the registered one.

    A plugin's class is looked up in the worker, which runs the plugin first; others are pickled.
    """
    own = OWN_ROLES.get(role, ours)
    return partial(_build, role) if own.__module__.startswith(MODULES) else own


def _build(role: Role, *args: Any) -> Any:
    return OWN_ROLES[role](*args)
