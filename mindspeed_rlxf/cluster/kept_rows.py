"""Rows that a worker process keeps for the ranks that read them, until the driver drops them.

The driver names the rows of each call by a key before they exist, so that it can submit the calls
that read them without waiting. Free of Ray.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mindspeed_rlxf.data.batch import Rows

Outcome = Any
"""What a method returned: rows, a reference to them, None; or the WorkerError that it raised."""


class KeptRows:
    """The outcomes of the methods that this process ran, by key. Any thread may use it."""

    def __init__(self) -> None:
        self._outcomes: dict[int, Outcome] = {}
        self._changed = threading.Condition()

    def put(self, key: int, outcome: Outcome) -> None:
        """Store an outcome, in place of an earlier one of `key`, and wake the threads that wait.

        Rows are copied, as the role may change its own later.
        """
        kept = copy_rows(outcome) if isinstance(outcome, Rows) else outcome
        with self._changed:
            self._outcomes[key] = kept
            self._changed.notify_all()

    def wait_for(self, keys: Sequence[int], timeout_s: float) -> dict[int, Outcome]:
        """Wait until all keys have an outcome, at most `timeout_s`; return the outcomes by key.

        At the deadline the keys without an outcome are left out.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while any(key not in self._outcomes for key in keys):
                if not self._changed.wait(max(deadline - time.monotonic(), 0)):
                    break
            return {key: self._outcomes[key] for key in keys if key in self._outcomes}

    def replace(self, key: int, outcome: Outcome) -> None:
        """Replace a stored outcome; does nothing where it has been dropped."""
        with self._changed:
            if key in self._outcomes:
                self._outcomes[key] = outcome

    def drop(self, keys: Iterable[int]) -> None:
        """Forget the outcomes of these keys; unknown keys are ignored."""
        with self._changed:
            for key in keys:
                self._outcomes.pop(key, None)

    def clear(self) -> None:
        with self._changed:
            self._outcomes.clear()

    def __len__(self) -> int:
        return len(self._outcomes)


def copy_rows(rows: Rows) -> Rows:
    """Return a copy of the rows with cloned tensors and copied lists."""
    columns = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
    return type(rows)(**{name: _copy(column) for name, column in columns.items()})


def count_bytes(rows: Rows) -> int:
    """Return the bytes of all tensors of the rows; other columns count nothing."""
    columns = [getattr(rows, field.name) for field in dataclasses.fields(rows)]
    return sum(column.nbytes for column in columns if isinstance(column, torch.Tensor))


def _copy(column: Any) -> Any:
    return column.clone() if isinstance(column, torch.Tensor) else list(column)
