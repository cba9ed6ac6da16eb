"""Reports cross the driver, so no tensor may hide in one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

PLAIN = (str, int, float, bool, type(None))  # the most of every report


def find_array(value: Any, path: str = "report") -> str | None:
    """Where in `value` the first tensor or array is, as `report.losses[2] (Tensor)`."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{path} ({type(value).__name__})"
    for name, item in _items(value):
        if not isinstance(item, PLAIN):
            found = find_array(item, path + name)
            if found is not None:
                return found
    return None


def check_report(report: Any, role: str, method: str) -> None:
    """Raise TypeError when a report holds a tensor or an array."""
    found = find_array(report)
    if found is not None:
        raise TypeError(
            f"{role}.{method} must report plain Python values, got {found}; "
            "return it in RoleOutput.rows, or as .item() or .tolist()"
        )


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        keys = [(f" key {key!r}", key) for key in value]
        return keys + [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)
        ]
    return []
