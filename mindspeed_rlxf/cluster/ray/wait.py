"""Waiting for Ray tasks with a deadline, and turning whatever goes wrong into our own errors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from mindspeed_rlxf.cluster.errors import DIED, RuntimeTimeout, WorkerError
from mindspeed_rlxf.data.batch import Rows

# After a lost connection was reported: how long to look for the failure that came before it.
FIRST_CAUSE_S = 5.0


@dataclass(frozen=True)
class Origin:
    """A rank at work, for messages."""

    role: str
    rank: int
    host: str
    phase: str
    log: str = ""  # where its output goes
    pool: str = ""

    def error(self, cause: str) -> WorkerError:
        return WorkerError(self.role, self.rank, self.host, self.phase, cause)


@dataclass(frozen=True)
class RayHandle:
    """Rows in the object store, and who put them there."""

    ref: Any  # ObjectRef of Rows, None or WorkerError
    origin: Origin

    def __repr__(self) -> str:
        return f"rows of {self.origin.role}.{self.origin.phase} from rank {self.origin.rank}"


def gather(tasks: Sequence[tuple[Any, Origin]], timeout_s: float) -> list[Any]:
    """Values of all tasks, each an ObjectRef with who computes it.

    Returns as soon as one fails: raises its WorkerError. At the deadline raises RuntimeTimeout
    with the ranks that did not arrive.
    """
    origins = dict(tasks)
    values: dict[Any, Any] = {}
    waiting = list(origins)
    deadline = time.monotonic() + timeout_s
    while waiting:
        ready, waiting = _wait(waiting, deadline - time.monotonic())
        if not ready:
            late = sorted((origins[ref] for ref in waiting), key=lambda origin: origin.rank)
            what = f"{late[0].role}.{late[0].phase}"
            ranks, hosts = [o.rank for o in late], [o.host for o in late]
            raise RuntimeTimeout(what, timeout_s, ranks, hosts=hosts)
        values.update(_read(ready, origins))
        failed = [value for value in values.values() if isinstance(value, WorkerError)]
        if failed:
            raise _first_cause(failed, waiting, origins)
    return [values[ref] for ref, _ in tasks]


def fetch_rows(handles: Sequence[RayHandle], timeout_s: float) -> list[Rows]:
    """Rows of other workers, on a worker. Raises the WorkerError of a rank that failed."""
    refs = [handle.ref for handle in handles]
    ready, missing = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
    origins = {handle.ref: handle.origin for handle in handles}
    if missing:
        late = ", ".join(repr(handle) for handle in handles if handle.ref in set(missing))
        raise TimeoutError(f"{late} did not arrive within {timeout_s:g} s")
    values = _read(ready, origins)
    for value in values.values():
        if isinstance(value, WorkerError):
            raise value
    return [values[ref] for ref in refs]


def not_ready(handles: Sequence[RayHandle]) -> list[RayHandle]:
    """Those whose rows do not exist yet."""
    if not handles:
        return []
    by_ref = {handle.ref: handle for handle in handles}
    unique = list(by_ref)
    _, missing = ray.wait(unique, num_returns=len(unique), timeout=0, fetch_local=False)
    return [by_ref[ref] for ref in missing]


def _wait(refs: list[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
    """At least one finished task, with all others that are finished too; none at the deadline."""
    ready, waiting = ray.wait(refs, num_returns=1, timeout=max(timeout_s, 0))
    if ready and waiting:
        more, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        ready = ready + more
    return ready, waiting


def _read(refs: Sequence[Any], origins: dict[Any, Origin]) -> dict[Any, Any]:
    try:
        return dict(zip(refs, ray.get(list(refs)), strict=True))
    except RayError:
        return {ref: _read_one(ref, origins[ref]) for ref in refs}


def _read_one(ref: Any, origin: Origin) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        return as_worker_error(error, origin)


def as_worker_error(error: RayError, origin: Origin) -> WorkerError:
    """What Ray says about a task, in one line."""
    died = origin.error(how_it_ended(error))
    if not died.cause.startswith(DIED):
        return died
    died = origin.error(
        died.cause + (f"; its last words are in {origin.log}" if origin.log else "")
    )
    died.remote_traceback = str(error)  # all that Ray knows
    return died


def how_it_ended(error: RayError) -> str:
    """What was raised, or how the process ended; begins with DIED where it did."""
    text = str(error)
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {cause}" if cause else text
    if not isinstance(error, (RayActorError, OutOfMemoryError)):
        return f"its result was lost ({type(error).__name__})"
    if "creation task" in text:  # the process is alive, our actor class could not be made in it
        return text.strip().splitlines()[-1]
    reason = "killed, crashed or out of memory"
    if isinstance(error, OutOfMemoryError) or "low on memory" in text:
        reason = "killed by Ray because its host ran out of memory"
    elif "node has died" in text or "raylet" in text.lower():
        reason = "Ray on its host ended, or the host"
    return f"{DIED} ({reason})"


def _first_cause(
    failed: list[WorkerError], waiting: list[Any], origins: dict[Any, Origin]
) -> WorkerError:
    """The failure that the others follow from, which may be reported a moment later."""
    deadline = time.monotonic() + FIRST_CAUSE_S
    while waiting and all(error.is_aftermath for error in failed):
        ready, waiting = _wait(waiting, deadline - time.monotonic())
        if not ready:
            break
        values = _read(ready, origins).values()
        failed = failed + [value for value in values if isinstance(value, WorkerError)]
    return min(failed, key=lambda error: (error.is_aftermath, error.rank))
