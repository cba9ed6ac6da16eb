"""Errors of workers, which name the role and rank, the host, the phase and the cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rlxf.config.errors import Problem, UserError

DIED = "the process died"  # start of the cause where a worker raised nothing


@dataclass(frozen=True)
class Origin:
    """Names a rank and the method that it runs, for messages. log: its log file; empty = none"""

    role: str
    rank: int
    host: str
    phase: str
    log: str = ""
    pool: str = ""

    @property
    def call(self) -> str:
        """Name the call: `critic.values`."""
        return f"{self.role}.{self.phase}"

    @property
    def rows(self) -> str:
        """Name the rows of the call: `rows of critic.values from rank 1`."""
        return f"rows of {self.call} from rank {self.rank}"

    def make_error(self, cause: str, remote_traceback: str = "") -> WorkerError:
        return WorkerError(self.role, self.rank, self.host, self.phase, cause, remote_traceback)


class WorkerError(RuntimeError):
    """A worker process raised or died.

    role:  role that was running; the pool's name while no role was
    phase: method of the role, or what the process did (`start`)
    cause: `ValueError: its message`, or how the process ended
    remote_traceback: of the cause, for the log; empty when the process died
    is_aftermath: the cause is a lost connection to another rank, so another failure came first
    errno: of the cause, if that is an OSError
    """

    def __init__(
        self,
        role: str,
        rank: int,
        host: str,
        phase: str,
        cause: str,
        remote_traceback: str = "",
        is_aftermath: bool = False,
        errno: int | None = None,
    ) -> None:
        super().__init__(f"{role} rank {rank} on {host} failed in {phase}: {cause}")
        self.role, self.rank, self.host = role, rank, host
        self.phase, self.cause = phase, cause
        self.remote_traceback = remote_traceback
        self.is_aftermath, self.errno = is_aftermath, errno

    @property
    def error(self) -> str:
        """Return the class of the cause as text, `ValueError`, or DIED."""
        return DIED if self.cause.startswith(DIED) else self.cause.partition(":")[0]

    def __reduce__(self) -> tuple[type[WorkerError], tuple[object, ...]]:
        state = (self.role, self.rank, self.host, self.phase, self.cause)
        return type(self), (*state, self.remote_traceback, self.is_aftermath, self.errno)


class RuntimeTimeout(RuntimeError):
    """A wait reached its deadline.

    what:    the call that was waited for, as `role.phase`
    missing: the ranks that did not arrive
    hint:    what these ranks do, or wait for themselves; empty = unknown
    hosts:   hosts of the missing ranks; empty = unknown
    role, phase: `what` before and after its first dot
    rank, host:  of the first missing rank; None = unknown
    """

    def __init__(
        self,
        what: str,
        seconds: float,
        missing: Sequence[int],
        hint: str = "",
        hosts: Sequence[str] = (),
    ) -> None:
        ranks = ", ".join(str(rank) for rank in missing)
        noun = "rank" if len(missing) == 1 else "ranks"
        message = f"{what}: {noun} {ranks} did not arrive within {seconds:g} s"
        super().__init__(f"{message}; {hint}" if hint else message)
        self.what, self.seconds = what, seconds
        self.missing, self.hint, self.hosts = list(missing), hint, list(hosts)
        self.role, _, self.phase = what.partition(".")
        self.rank = self.missing[0] if self.missing else None
        self.host = self.hosts[0] if self.hosts else None

    def __reduce__(self) -> tuple[type[RuntimeTimeout], tuple[object, ...]]:
        return type(self), (self.what, self.seconds, self.missing, self.hint, self.hosts)


class DevicesMissing(RuntimeError):
    """A joined cluster did not have the devices in time; the same command may succeed later.

    free: devices of each node that were free
    """

    def __init__(self, message: str, free: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.free = list(free)


class StorageUnreadable(RuntimeError):
    """Files of the run cannot be read now, which says nothing about their content.

    The same command may succeed later.
    """


class TooFewDevices(UserError):
    """Our own cluster, which never grows, has too few devices. free: free devices of each node"""

    def __init__(self, problems: Sequence[Problem], free: Sequence[int] = ()) -> None:
        super().__init__(problems)
        self.free = list(free)
