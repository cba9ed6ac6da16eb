"""Wait for calls of ranks with a deadline, and turn Ray's errors into WorkerErrors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 0.5  # between two polls of running calls


@dataclass(frozen=True, eq=False)
class RankCall:
    """A call of one rank; also the driver's handle of the rows that it returns.

    reply:  Ray's reference to the reply
    rows:   Ray's reference to the rows, which the driver hands on and never reads
    inputs: calls whose rows this one reads; empty once all ranks have replied
    """

    origin: Origin
    reply: Any
    rows: Any = None
    inputs: list[RankCall] = field(default_factory=list)

    def __repr__(self) -> str:
        return self.origin.rows

    def late_inputs(self) -> list[RankCall]:
        """Return the calls that have not made the rows yet which this one reads."""
        calls = {call.rows: call for call in self.inputs}
        if not calls:
            return []
        late = ray.wait(list(calls), num_returns=len(calls), timeout=0, fetch_local=False)[1]
        return [calls[ref] for ref in late]


def gather(calls: Sequence[RankCall], timeout_s: float) -> list[Any]:
    """Wait for all calls; return their replies in order.

    A failed call is noticed within LONGEST_LOOK_S. Then raises the WorkerError that
    `_find_first_cause` chooses, which may wait FIRST_CAUSE_S for others. At the deadline raises
    RuntimeTimeout with the late ranks.
    """
    by_ref = {call.reply: call for call in calls}
    values: dict[Any, Any] = {}
    waiting = list(by_ref)
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
            late = sorted((by_ref[ref].origin for ref in waiting), key=lambda origin: origin.rank)
            ranks, hosts = [o.rank for o in late], [o.host for o in late]
            raise RuntimeTimeout(late[0].call, timeout_s, ranks, hosts=hosts)
        found = _read_values(ready, by_ref)
        values.update(found)
        failed = [value for value in found.values() if isinstance(value, WorkerError)]
        if failed:
            raise _find_first_cause(failed, waiting, by_ref)
    return [values[call.reply] for call in calls]


def _read_values(refs: Sequence[Any], by_ref: dict[Any, RankCall]) -> dict[Any, Any]:
    """Return the reply of each ended call by its reference; of a failed one its WorkerError."""
    try:
        return dict(zip(refs, ray.get(list(refs)), strict=True))
    except RayError:
        values: dict[Any, Any] = {}
    for ref in refs:
        try:
            values[ref] = ray.get(ref)
        except RayError as error:
            values[ref] = as_worker_error(error, by_ref[ref])
    return values


def as_worker_error(error: RayError, call: RankCall) -> WorkerError:
    """Return the WorkerError for what Ray raised for a call.

    That of a rank which raised, also if this call only reads its rows; else a new one of the rank
    whose process died, with its log, or whose rows were lost.
    """
    cause: Any = error
    while isinstance(cause, RayTaskError) and cause.cause is not None:
        cause = cause.cause
    if isinstance(cause, WorkerError):
        return cause
    lost = getattr(cause, "object_ref_hex", None) or getattr(cause, "actor_id", None)
    ids = ((each, {each.rows.hex(), _actor_id(each)}) for each in call.inputs)
    origin = next((each for each, known in ids if lost in known), call).origin
    text = describe_end(cause)
    if not text.startswith(DIED):
        return origin.make_error(text)
    if origin.log:
        text += f"; its last output is in {origin.log}"
    return origin.make_error(text, remote_traceback=str(cause))


def _actor_id(call: RankCall) -> str:
    return str(call.reply.task_id().actor_id().hex())


def describe_end(cause: Exception) -> str:
    """Return what a task raised, as `ValueError: text`, or why it has no result.

    The text begins with DIED if the process of the task has died.
    """
    text = str(cause)
    if not isinstance(cause, RayError):
        return f"{type(cause).__name__}: {text}"
    if isinstance(cause, RayTaskError):
        return text
    if not isinstance(cause, (RayActorError, OutOfMemoryError, OwnerDiedError)):
        return f"its result was lost ({type(cause).__name__})"
    if "creation task" in text:  # the process is alive, our actor class could not be made in it
        return text.strip().splitlines()[-1]
    reason = "killed, crashed or out of memory"
    if isinstance(cause, OutOfMemoryError) or "low on memory" in text:
        reason = "killed by Ray because its host ran out of memory"
    elif "node has died" in text or "raylet" in text.lower():
        reason = "Ray on its host ended, or the host"
    return f"{DIED} ({reason})"


def _find_first_cause(
    failed: list[WorkerError], waiting: list[Any], by_ref: dict[Any, RankCall]
) -> WorkerError:
    """Return the failure that caused the others: of those that are no aftermath the lowest rank's.

    While all are aftermath, waits up to FIRST_CAUSE_S for more; then the lowest rank's is returned.
    waiting: replies that are not there yet
    """
    deadline = time.monotonic() + FIRST_CAUSE_S
    while waiting and all(error.is_aftermath for error in failed):
        if not ray.wait(waiting, timeout=max(deadline - time.monotonic(), 0))[0]:
            break
        ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        values = _read_values(ready, by_ref).values()
        failed = failed + [value for value in values if isinstance(value, WorkerError)]
    return min(failed, key=lambda error: (error.is_aftermath, error.rank))
