"""Worker errors with role, rank, host and phase, and hang diagnosis from worker logs."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DIED = "the process died"  # start of the cause where a worker raised nothing


@dataclass(frozen=True)
class Origin:
    """A rank and its method, for messages."""

    role: str
    rank: int
    host: str
    phase: str
    log: str = ""  # file with its output; empty if there is none

    @property
    def call(self) -> str:
        """The call as `role.phase`."""
        return f"{self.role}.{self.phase}"

    def make_error(self, cause: str, remote_traceback: str = "") -> WorkerError:
        """Return the WorkerError for this rank."""
        return WorkerError(self.role, self.rank, self.host, self.phase, cause, remote_traceback)


class WorkerError(RuntimeError):
    """A worker process raised or died.

    Attributes:
        role: Running role; the pool name if no role was running.
        phase: Role method, or what the process did (`start`).
        cause: `ValueError: its message`, or how the process ended.
        remote_traceback: Worker traceback, for the log; empty if the process died.
        is_aftermath: The cause is a lost connection to another rank, so another failure came first.
        errno: Set if the cause is an OSError.
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
        self.role = role
        self.rank = rank
        self.host = host
        self.phase = phase
        self.cause = cause
        self.remote_traceback = remote_traceback
        self.is_aftermath = is_aftermath
        self.errno = errno

    @property
    def error(self) -> str:
        """The error class as text, for example `ValueError`, or DIED."""
        return DIED if self.cause.startswith(DIED) else self.cause.partition(":")[0]

    def __reduce__(self) -> tuple[type[WorkerError], tuple[object, ...]]:
        state = (self.role, self.rank, self.host, self.phase, self.cause)
        return type(self), (*state, self.remote_traceback, self.is_aftermath, self.errno)


class RuntimeTimeout(RuntimeError):
    """A wait reached its deadline.

    `role` and `phase` are `what` around its first dot; `rank` and `host` those of the first late
    rank.

    Attributes:
        what: Late call as `role.phase`.
        missing: Late ranks.
        hint: What these ranks do, or wait for themselves; empty if unknown.
        hosts: Hosts with late ranks; empty if unknown.
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
        self.what = what
        self.seconds = seconds
        self.missing = list(missing)
        self.hint = hint
        self.hosts = list(hosts)
        self.role, _, self.phase = what.partition(".")
        self.rank = self.missing[0] if self.missing else None
        self.host = self.hosts[0] if self.hosts else None

    def __reduce__(self) -> tuple[type[RuntimeTimeout], tuple[object, ...]]:
        return type(self), (self.what, self.seconds, self.missing, self.hint, self.hosts)


class DevicesMissing(RuntimeError):
    """A joined cluster lacked devices at the deadline; the same command may succeed later."""


class StorageUnreadable(RuntimeError):
    """Run files cannot be read now, which says nothing about their content.

    The same command may succeed later.
    """


STDERR = 2
EARLY = 0.8  # fraction of the deadline after which the stacks are written
TAIL_BYTES = 256 * 1024
DUMP = "Timeout ("  # start of the stacks in a log
ENDED = "the call that wrote its stacks has ended"

FRAME = re.compile(r'^  File "(.+)", line \d+ in (.+)$', re.MULTILINE)
THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)


@contextmanager
def stacks_when_late(timeout_s: float) -> Iterator[None]:
    """Write this process's stacks to stderr if the block takes EARLY * `timeout_s` seconds."""
    started = time.monotonic()
    faulthandler.dump_traceback_later(EARLY * timeout_s, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if time.monotonic() - started >= EARLY * timeout_s:
            print(ENDED, file=sys.stderr, flush=True)


def explain_timeout(
    error: RuntimeTimeout, late: Sequence[Origin], lacks_rows: Mapping[Origin, bool]
) -> RuntimeTimeout:
    """Return a RuntimeTimeout that names the ranks to blame, and says what they do.

    Late ranks not waiting for others are to blame; if all wait, the row producers that do not wait;
    otherwise every late rank. `lacks_rows` has the late ranks, then the ranks whose rows they lack;
    True means the rank waits for rows itself, so its call has not begun.
    """
    activity: dict[Origin, str] = {}
    working = []
    for origin, lacks in lacks_rows.items():
        if lacks:
            activity[origin] = "waiting for rows"
            continue
        activity[origin], waits = describe_stack(read_stack(origin.log))
        if not waits:
            working.append(origin)
    blamed = [origin for origin in late if origin in working] or working or list(late)
    call = blamed[0].call
    blamed_by_rank = {origin.rank: origin for origin in blamed if origin.call == call}
    ranks = list(blamed_by_rank)
    hosts = [origin.host for origin in blamed_by_rank.values()]
    hints = dict.fromkeys(activity[origin] for origin in blamed_by_rank.values())
    return RuntimeTimeout(call, error.seconds, ranks, "; ".join(hints), hosts)


def read_stack(log: str) -> str:
    """Return the stacks the worker's current call wrote to its log, or an empty string."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    stack = text.rpartition(DUMP)[2] if DUMP in text else ""
    return stack if THREAD.search(stack) and ENDED not in stack else ""


def describe_stack(stack: str) -> tuple[str, bool]:
    """Return what the role thread does, and whether it waits in torch.distributed."""
    if not stack:
        return "no stack in its log: stopped, gone, or no shared storage", False
    role_thread = next((t for t in THREAD.split(stack) if "cluster/worker.py" in t), None)
    if role_thread is None:
        return "no call to work on", False
    frames = FRAME.findall(role_thread)
    if any("torch/distributed/" in file for file, _ in frames):
        return "waiting for others in a collective", True
    package_frames = [(file, name) for file, name in frames if "mindspeed_rlxf" in file]
    file, name = package_frames[0]
    return f"in {Path(file).stem}.{name} (innermost frame: {frames[0][1]})", False
