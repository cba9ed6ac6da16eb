"""Share process groups between roles of one layout until the process leaves its world.

If groups ended with a role, ranks that drop a role at different times would disagree on the groups
that exist, and the next collective that makes groups would hang. This module imports no Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Layout = tuple[int, int, int]  # tensor, pipeline and expert parallel size

_made: dict[Layout, dict[str, Any]] = {}


def groups_of_layout(layout: Layout, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a copy of Megatron's globals with the groups of a layout.

    Calls `make` only for a layout that was not asked for before.
    """
    if layout not in _made:
        _made[layout] = make()
    return dict(_made[layout])


def forget() -> None:
    """Drop the groups of all layouts; call it before the torch world ends."""
    _made.clear()
