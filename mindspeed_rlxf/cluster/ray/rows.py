"""References to rows that stay in the worker that made them, and how other workers fetch them.

The driver only names rows. A worker reads its own rows from its memory and asks other workers for
theirs, so that neither rows nor their bookkeeping pass through the driver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from mindspeed_rlxf.cluster.diagnosis import EARLY
from mindspeed_rlxf.cluster.errors import DIED, Origin, WorkerError
from mindspeed_rlxf.cluster.kept_rows import KeptRows, Outcome, copy_rows, count_bytes
from mindspeed_rlxf.cluster.ray.wait import KILLED, as_worker_error, make_death_error
from mindspeed_rlxf.data.batch import Rows

if TYPE_CHECKING:
    from mindspeed_rlxf.cluster.ray.pool import RayPool

READERS = 16  # calls of other workers that a worker answers at the same time
WAITING = READERS // 2  # how many of these may wait for rows that do not exist yet
ASK_S = 1.0  # longest time that such a call waits before it is answered
PAUSE_S = 0.1  # before the same process is asked again, if it had nothing new
SHARED_BYTES = 64 * 1024  # larger rows are put into the host's shared memory, once for all readers


@dataclass(frozen=True)
class KeptHandle:
    """A handle of one rank's rows, for workers.

    process: name of the actor that keeps the rows
    key:     key of the rows in that process
    """

    process: str
    key: int
    origin: Origin

    def __repr__(self) -> str:
        return self.origin.rows


class CallRows:
    """The rows of one call, for the driver.

    When this object is collected, each rank is told with its next message to drop the rows.
    replies: references to the replies of the ranks from `first_rank` on; empty once
             `RayCall.wait` has returned them
    """

    def __init__(self, pool: RayPool, key: int, first_rank: int, replies: list[Any]) -> None:
        self.pool, self.key, self.first_rank, self.replies = pool, key, first_rank, replies
        self._size = len(replies)

    def __del__(self) -> None:
        self.pool.drop_rows(self.key, range(self.first_rank, self.first_rank + self._size))


class RayHandle:
    """A handle of one rank's rows, for the driver; equal only to itself.

    It is pickled as a KeptHandle.
    """

    def __init__(self, call: CallRows, origin: Origin) -> None:
        self.call, self.origin = call, origin

    @cached_property
    def address(self) -> tuple[Any, ...]:
        """Return (actor name, key, role, rank, host, phase, log, pool), as plain values.

        They are the rank's process, the call, and fields of the origin.
        """
        process, o = self.call.pool.workers.places[self.origin.rank].process, self.origin
        return process, self.call.key, o.role, o.rank, o.host, o.phase, o.log, o.pool

    def __reduce__(self) -> tuple[type[KeptHandle], tuple[str, int, Origin]]:
        process, key, *_ = self.address
        return KeptHandle, (process, key, self.origin)

    def __repr__(self) -> str:
        return self.origin.rows


def find_missing(handles: Sequence[RayHandle]) -> list[RayHandle]:
    """Return the handles of ranks that have not replied yet, one for each rank of a call.

    Does not wait. Calls that `RayCall.wait` has ended have no late ranks.
    """
    late = {}
    for handle in handles:
        if handle.call.replies:
            late[handle.call.replies[handle.origin.rank - handle.call.first_rank]] = handle
    if not late:
        return []
    refs = list(late)
    _, missing = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
    return [late[ref] for ref in missing]


class WorkerRows:
    """The rows that this worker process keeps, and its access to the rows of other workers."""

    def __init__(self) -> None:
        self.kept, self.timeout_s = KeptRows(), 0.0
        self.process = ""  # the name of this actor
        self._actors: dict[str, Any] = {}
        self._may_wait = threading.Semaphore(WAITING)
        self._sharing = threading.Lock()

    def clear(self) -> None:
        """Drop all rows and forget the other workers."""
        self.kept.clear()
        self._actors.clear()

    def give(self, keys: Sequence[int]) -> dict[int, Any]:
        """Wait up to ASK_S until all these keys have an outcome; return by key those that exist.

        Does not wait for outcomes if WAITING other calls do. Rows of SHARED_BYTES or more are moved
        to the host's shared memory, one call after the other, and returned as Ray's ObjectRef.
        """
        waits = self._may_wait.acquire(blocking=False)
        try:
            found = self.kept.wait_for(keys, ASK_S if waits else 0.0)
        finally:
            if waits:
                self._may_wait.release()
        with self._sharing:  # one reader moves the rows, the others find them moved
            return {key: self._move_if_large(key, outcome) for key, outcome in found.items()}

    def _move_if_large(self, key: int, outcome: Outcome) -> Any:
        """Move rows of SHARED_BYTES or more to shared memory and return their ObjectRef.

        Rows that another reader has moved are not moved again; other outcomes are returned
        unchanged.
        """
        outcome = self.kept.wait_for([key], 0.0).get(key, outcome)
        if not isinstance(outcome, Rows) or count_bytes(outcome) < SHARED_BYTES:
            return outcome
        ref = ray.put(outcome)
        self.kept.replace(key, ref)
        return ref

    def fetch_rows(self, handles: Sequence[KeptHandle]) -> list[Any]:
        """Wait until the rows of all these handles are here; return them in the order of `handles`.

        The driver has the deadline of the call that makes them. When all have come, raises the
        WorkerError of a rank that failed or died, gave no answer within `timeout_s`, or whose rows
        Ray could not deliver.
        """
        waiting = _by_process(handles)
        values: dict[KeptHandle, Any] = {}
        for handle in waiting.pop(self.process, []):
            values[handle] = self._read_own(handle)
        while waiting:
            found = self._ask_processes(waiting)
            values |= found
            left = {p: [h for h in asked if h not in values] for p, asked in waiting.items()}
            waiting = {process: asked for process, asked in left.items() if asked}
            if waiting and not found:
                time.sleep(PAUSE_S)
        for value in values.values():
            if isinstance(value, WorkerError):
                raise value
        return [values[handle] for handle in handles]

    def _read_own(self, handle: KeptHandle) -> Outcome:
        """Return an outcome of this process: rows as a copy, a WorkerError as it is.

        Calls run in order, so the outcome exists; asserts that it was not dropped. Rows that `give`
        has moved are read from shared memory, without a deadline.
        """
        outcomes = self.kept.wait_for([handle.key], 0.0)
        assert handle.key in outcomes, f"{handle} were dropped before they were read"
        outcome = outcomes[handle.key]
        if isinstance(outcome, ray.ObjectRef):
            return ray.get(outcome)
        return copy_rows(outcome) if isinstance(outcome, Rows) else outcome

    def _ask_processes(self, waiting: dict[str, list[KeptHandle]]) -> dict[KeptHandle, Outcome]:
        """Ask each process once for its rows; return the outcomes.

        The key is the handle. Rows that a process does not have yet are left out. If a process has
        died or does not answer, or Ray raises another error, the outcome of its rows is a
        WorkerError.
        waiting: actor name -> handles
        """
        values: dict[KeptHandle, Any] = {}
        asked: dict[Any, list[KeptHandle]] = {}
        for process, handles in waiting.items():
            try:
                actor = self._actors.get(process) or ray.get_actor(process)
            except ValueError:  # Ray has forgotten it
                values |= {h: make_death_error(h.origin, f"{DIED} ({KILLED})") for h in handles}
                continue
            self._actors[process] = actor
            asked[actor.give_rows.remote([h.key for h in handles])] = handles
        if not asked:
            return values
        limit_s = EARLY * self.timeout_s + 2 * ASK_S  # before the driver's, which knows less
        ready, silent = ray.wait(list(asked), num_returns=len(asked), timeout=limit_s)
        for ref in ready:
            values |= _read_answer(ref, asked[ref], limit_s)
        for ref in silent:
            values |= {h: _no_answer(h, limit_s) for h in asked[ref]}
        return values


def _by_process(handles: Sequence[KeptHandle]) -> dict[str, list[KeptHandle]]:
    """Group handles, without repeats, by the actor name of their process."""
    found: dict[str, list[KeptHandle]] = {}
    for handle in dict.fromkeys(handles):
        found.setdefault(handle.process, []).append(handle)
    return found


def _no_answer(handle: KeptHandle, limit_s: float) -> WorkerError:
    return handle.origin.make_error(f"its process gave no rows within {limit_s:g} s (stopped?)")


def _read_answer(ref: Any, handles: Sequence[KeptHandle], limit_s: float) -> dict[KeptHandle, Any]:
    """Return the outcomes that a process sent, by handle.

    After any error of Ray, as when the process died, and if rows in shared memory do not arrive
    within `limit_s`, the outcome of every handle is a WorkerError. Handles without an outcome are
    left out. ref: of an answer that is here
    """
    try:
        answer = ray.get(ref)
        shared = {key: each for key, each in answer.items() if isinstance(each, ray.ObjectRef)}
        answer |= dict(zip(shared, ray.get(list(shared.values()), timeout=limit_s), strict=True))
    except GetTimeoutError:
        return {handle: _no_answer(handle, limit_s) for handle in handles}
    except RayError as error:
        return {handle: as_worker_error(error, handle.origin) for handle in handles}
    return {handle: answer[handle.key] for handle in handles if handle.key in answer}
