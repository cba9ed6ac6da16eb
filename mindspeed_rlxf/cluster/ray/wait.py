"""Wait for Ray tasks with a deadline, and turn Ray's errors into WorkerErrors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import (
    OutOfMemoryError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RayTaskError,
)

from mindspeed_rlxf.cluster.errors import DIED, Origin, RuntimeTimeout, WorkerError

# How long to wait for the first failure after a lost connection was reported.
FIRST_CAUSE_S = 5.0
KILLED = "killed, crashed or out of memory"
FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 0.5  # between two polls of running calls


def gather(tasks: Sequence[tuple[Any, Origin]], timeout_s: float) -> list[Any]:
    """Wait for all tasks; return their values in order.

    tasks: (ObjectRef, the rank that computes it)
    A task that fails or returns a WorkerError is noticed within LONGEST_LOOK_S. Then raises the
    WorkerError that `_find_first_cause` chooses, which may wait FIRST_CAUSE_S for others. At the
    deadline raises RuntimeTimeout with the late ranks.
    """
    origins = dict(tasks)
    values: dict[Any, Any] = {}
    waiting = list(origins)
    deadline = time.monotonic() + timeout_s
    patience_s = FIRST_LOOK_S
    while waiting:
        # Ranks mostly end together. Waiting in slices finds an early failure.
        left_s = max(min(patience_s, deadline - time.monotonic()), 0)
        ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=left_s)
        patience_s = min(2 * patience_s, LONGEST_LOOK_S)
        if not ready and time.monotonic() < deadline:
            continue
        if not ready:
            late = sorted((origins[ref] for ref in waiting), key=lambda origin: origin.rank)
            ranks, hosts = [o.rank for o in late], [o.host for o in late]
            raise RuntimeTimeout(late[0].call, timeout_s, ranks, hosts=hosts)
        found = _read_values(ready, origins)
        values.update(found)
        failed = [value for value in found.values() if isinstance(value, WorkerError)]
        if failed:
            raise _find_first_cause(failed, waiting, origins)
    return [values[ref] for ref, _ in tasks]


def _read_values(refs: Sequence[Any], origins: dict[Any, Origin]) -> dict[Any, Any]:
    """Return the value of each ended task by its ObjectRef; of a failed one its WorkerError."""
    try:
        return dict(zip(refs, ray.get(list(refs)), strict=True))
    except RayError:
        values: dict[Any, Any] = {}
    for ref in refs:
        try:
            values[ref] = ray.get(ref)
        except RayError as error:
            values[ref] = as_worker_error(error, origins[ref])
    return values


def as_worker_error(error: RayError, origin: Origin) -> WorkerError:
    """Return the WorkerError for an error of Ray; its cause is `describe_end`.

    For a process that died the cause also names its log.
    """
    cause = describe_end(error)
    return (
        make_death_error(origin, cause, str(error))
        if cause.startswith(DIED)
        else origin.make_error(cause)
    )


def make_death_error(origin: Origin, cause: str, details: str = "") -> WorkerError:
    """Return the error of a process that died; its cause names the log, if there is one.

    cause: begins with DIED; details: becomes the traceback in the driver's log
    """
    if origin.log:
        cause += f"; its last output is in {origin.log}"
    return origin.make_error(cause, remote_traceback=details)


def describe_end(error: RayError) -> str:
    """Return what a task raised, as `ValueError: text`, or why it has no result.

    The text begins with DIED if the process of the task has died.
    """
    text = str(error)
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {cause}" if cause else text
    if not isinstance(error, (RayActorError, OutOfMemoryError, OwnerDiedError)):
        return f"its result was lost ({type(error).__name__})"
    if "creation task" in text:  # the process is alive, our actor class could not be made in it
        return text.strip().splitlines()[-1]
    reason = KILLED
    if isinstance(error, OutOfMemoryError) or "low on memory" in text:
        reason = "killed by Ray because its host ran out of memory"
    elif "node has died" in text or "raylet" in text.lower():
        reason = "Ray on its host ended, or the host"
    return f"{DIED} ({reason})"


def _find_first_cause(
    failed: list[WorkerError], waiting: list[Any], origins: dict[Any, Origin]
) -> WorkerError:
    """Return the failure that caused the others: of those that are no aftermath the lowest rank's.

    While all are aftermath, waits up to FIRST_CAUSE_S for more; then the lowest rank's is returned.
    waiting: tasks that have not ended
    """
    deadline = time.monotonic() + FIRST_CAUSE_S
    while waiting and all(error.is_aftermath for error in failed):
        if not ray.wait(waiting, timeout=max(deadline - time.monotonic(), 0))[0]:
            break
        ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        values = _read_values(ready, origins).values()
        failed = failed + [value for value in values if isinstance(value, WorkerError)]
    return min(failed, key=lambda error: (error.is_aftermath, error.rank))
