"""Decide whether a failed run starts again, and with which processes. Imports no heavy package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIRST_PAUSE_S = 5.0  # what the last attempt left is ended meanwhile
LONGEST_PAUSE_S = 300.0


@dataclass(frozen=True)
class Failure:
    """A failure of the training.

    iteration: that failed; None = unknown
    cause:     role, phase, class of the error, errno; None = a mistake found by a restart, which
               is not the same failure as any other
    saved:     iteration of the newest checkpoint; "" = none
    """

    iteration: int | None
    cause: tuple[Any, ...] | None
    saved: str


class Restarts:
    """Counts the restarts of one command since its newest checkpoint."""

    def __init__(self) -> None:
        self.used = 0  # since the newest checkpoint, or since the first failure
        self._last: Failure | None = None

    @property
    def pause_s(self) -> float:
        """Seconds before the next restart: 5, 10, 20, ... 300 since the newest checkpoint."""
        return min(FIRST_PAUSE_S * 2.0 ** (self.used - 1), LONGEST_PAUSE_S)

    def decide(self, failure: Failure, allowed: int) -> tuple[bool, str]:
        """Return whether to start again, and the reason; count the restart if so.

        allowed: `training.max_restarts`; 0 = never, with "" as the reason

        Refuses a failure with the cause and the iteration of the failure before it. The count is
        set to 0 if there is a newer checkpoint than at that one.
        """
        last = self._last
        if failure.cause is not None or last is None:
            self._last = failure
        if last is not None and _is_newer(failure.saved, last.saved):
            self.used = 0
        before = None if last is None or last.cause is None else (last.iteration, last.cause)
        if before == (failure.iteration, failure.cause):
            place = "" if failure.iteration is None else f" in iteration {failure.iteration}"
            return False, f"it failed twice{place} with the same cause"
        if not allowed:
            return False, ""
        if self.used >= allowed:
            return False, f"training.max_restarts={allowed} are used up since the last checkpoint"
        self.used += 1
        place = f"the checkpoint of iteration {failure.saved}" if failure.saved else "the start"
        return True, f"{self.used} of {allowed} (training.max_restarts), from {place}"


def _is_newer(saved: str, before: str) -> bool:
    """Whether checkpoint `saved` is of a later iteration than `before`; "" = no checkpoint."""
    return saved.isdigit() and int(saved) > (int(before) if before.isdigit() else 0)


def smaller_pools(
    pools: Mapping[str, Mapping[str, Any]], free: Sequence[int]
) -> Iterator[dict[str, list[int]]]:
    """Yield smaller shapes of the pool with the most processes, the largest shape first.

    pools: name -> `processes` on each node, and `step`: processes of one replica
    free:  devices of each node; the other pools keep their number of processes
    Yields {name: processes on each node} for each multiple of `step` that is below the current
    number and fits beside the other pools, on as few nodes as possible; nothing if none fits.
    """
    largest = max(pools, key=lambda name: sum(pools[name]["processes"]))
    others = sum(sum(pool["processes"]) for name, pool in pools.items() if name != largest)
    now, step = sum(pools[largest]["processes"]), int(pools[largest]["step"])
    most = min(now - 1, sum(free) - others)
    for count in range(most - most % step, 0, -step):
        yield {largest: _fill_nodes(count, sorted(free, reverse=True))}


def _fill_nodes(count: int, free: Sequence[int]) -> list[int]:
    """Return processes per node, on as few nodes as possible; nodes without one are left out.

    They are `count` in all, or fewer if there are fewer devices.
    free: devices of each node, descending
    """
    shape = []
    for devices in free:
        shape.append(min(count, devices))
        count -= shape[-1]
    return [size for size in shape if size > 0]
