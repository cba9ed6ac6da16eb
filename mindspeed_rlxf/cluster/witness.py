"""Diagnose workers that hang or have died, from the agents of their hosts.

The workers themselves are not called: a stopped process, or one stuck in C, does not answer. A
signal makes Python write the stack of every thread of a worker to its log, even when it is stuck in
C. The process table shows whether a worker is alive or stopped. Free of Ray.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rlxf.cluster.errors import DIED, HostError, Origin, RuntimeTimeout, WorkerError
from mindspeed_rlxf.cluster.host_agent import HostAgent, collect_outcomes
from mindspeed_rlxf.cluster.nodes import Place
from mindspeed_rlxf.files.safe import make_private_folder, mode_within, open_file, replace_file

logger = logging.getLogger(__name__)

ANSWER_S = 30.0  # deadline of a host's answer; its agent may have to start first
STACK_SIGNAL = signal.SIGUSR2
FETCHED = "[the end of this log, fetched from "  # first words of a copied log
STDERR = 2
STACK_S = 2.0  # longest wait for the stacks in the logs
TAIL_BYTES = 64 * 1024  # bytes of each log's end that are sent to the driver

STOPPED = "is stopped (SIGSTOP, or a debugger)"
GONE = "is gone"
SILENT = "answers no signal (stuck in the kernel, perhaps in a driver or a file system)"

FRAME = re.compile(r'^  File "(?P<file>.+)", line \d+ in (?P<function>.+)$', re.MULTILINE)
THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)


@dataclass(frozen=True)
class Subject:
    """A worker process on this host. log: path of its log; empty = unknown"""

    rank: int
    pid: int
    log: str


@dataclass(frozen=True)
class Sighting:
    """The state of a worker, as seen from its host."""

    rank: int
    state: str  # a predicate for messages: `is gone`
    waits: bool  # True = it waits for other ranks, which are the late ones
    tail: str  # end of its log
    oom_kills: int = 0  # processes that its host has killed for lack of memory so far


@dataclass(frozen=True)
class Watched:
    """A worker that may be inspected. log: path of its log on its host; empty = unknown"""

    pool: str
    rank: int
    place: Place
    log: str
    agent: HostAgent


def show_stacks_on_signal() -> None:
    """Make this process write all its stacks to stderr on STACK_SIGNAL and on a crash in C."""
    faulthandler.enable(STDERR)
    faulthandler.register(STACK_SIGNAL, STDERR, all_threads=True)


def inspect_hosts(workers: Sequence[Watched], stacks: bool) -> dict[tuple[str, int], Sighting]:
    """Inspect workers on their hosts; return what was seen by (pool, rank).

    Workers of a host that fails or does not answer within ANSWER_S are left out, with a warning in
    the log.
    stacks: True = signal each worker to write the stacks of its threads to its log
    """
    by_agent: dict[HostAgent, list[Watched]] = defaultdict(list)
    for worker in workers:
        by_agent[worker.agent].append(worker)
    calls = []
    for agent, found in by_agent.items():
        subjects = [Subject(w.rank, w.place.pid, w.log) for w in found]
        calls.append(agent.start(inspect_workers, subjects, stacks, timeout_s=ANSWER_S))
    answers: dict[tuple[str, int], Sighting] = {}
    for found, reply in zip(by_agent.values(), collect_outcomes(calls), strict=True):
        if isinstance(reply, HostError):
            logger.warning(
                "cannot fetch stacks and logs of the ranks on %s: %s", reply.host, reply.cause
            )
        else:
            answers.update({(w.pool, w.rank): s for w, s in zip(found, reply, strict=True)})
    return answers


def inspect_workers(subjects: Sequence[Subject], stacks: bool) -> list[Sighting]:
    """Return the states of workers of this host, in order, with the ends of their logs.

    stacks: True = signal each worker, unless it is stopped or gone, to write the stacks of its
            threads to its log; wait up to STACK_S for them
    """
    kills = oom_kills()
    before = {subject: _log_size(subject.log) for subject in subjects}  # pools share ranks
    asked = [
        s
        for s in subjects
        if stacks and _state_letter(s.pid) not in "TtZX" and _request_stacks(s.pid)
    ]
    deadline = time.monotonic() + STACK_S
    sizes: list[int] = []
    while time.monotonic() < deadline:
        time.sleep(0.1)
        seen, sizes = sizes, [_log_size(s.log) for s in asked]
        if sizes == seen and all(_stack_since(s.log, before[s]) for s in asked if s.log):
            break
    found = []
    for subject in subjects:
        stack = _stack_since(subject.log, before[subject]) if subject in asked else ""
        state, waits = _describe_state(subject, stack, subject in asked)
        found.append(Sighting(subject.rank, state, waits, read_tail(subject.log), kills))
    return found


def _describe_state(subject: Subject, stack: str, asked: bool) -> tuple[str, bool]:
    """Return (a process's state in words for a message, whether it waits for other ranks).

    Only stacks can show that it waits. Ended and stopped processes are called so; others are just
    "alive" if they were not asked or have no log, SILENT if they were asked and wrote no stacks.
    stack: the stacks that it wrote to its log; empty = none
    asked: whether it was signalled to write them
    """
    letter = _state_letter(subject.pid)
    if letter in "ZX":
        return GONE, False
    if letter in "Tt":
        return STOPPED, False
    if not asked or not subject.log:
        return "is alive", False
    return describe_stack(stack) if stack else (SILENT, False)


def describe_stack(stack: str) -> tuple[str, bool]:
    """Return what the thread that runs roles does, in words, and whether it waits for other ranks.

    It waits if it is in `fetch_rows` or in torch.distributed.
    stack: the stacks of all threads, as `faulthandler` writes them; without such a thread the
           process "has no call to work on"
    """
    threads = THREAD.split(stack)[1:]
    ours = next((t for t in threads if "cluster/worker.py" in t), None)
    if ours is None:
        return "has no call to work on", False
    frames = [(f["file"], f["function"]) for f in FRAME.finditer(ours)]
    if any(name == "fetch_rows" for _, name in frames):
        return "waits for rows", True
    collective = [name for file, name in frames if "torch/distributed/" in file]
    if collective:
        named = [name for name in collective if not name.startswith(("wrapper", "_", "<"))]
        return f"waits for others in {(named or collective)[-1]}", True
    file, name = frames[0]
    caller = next((f"{Path(f).stem}.{n}" for f, n in frames if "mindspeed_rlxf" in f), "")
    inside = f" from {caller}" if caller and "mindspeed_rlxf" not in file else ""
    return f"is in {Path(file).stem}.{name}{inside}", False


def explain_timeout(
    error: RuntimeTimeout,
    pool: str,
    producers: Sequence[Origin],
    seen: Mapping[tuple[str, int], Sighting],
    keepers: Sequence[Origin] = (),
) -> RuntimeTimeout:
    """Return a new RuntimeTimeout, with the states of the missing ranks in its message.

    Its `missing` leaves out ranks that only wait for other ranks. If all of them wait, it names the
    call and the ranks that `_late_producers` finds among the producers and those keepers that
    cannot answer any more; if that finds none, all missing ranks stay.

    pool:      pool of the missing ranks
    producers: ranks that make the rows which the missing ranks wait for
    seen:      what inspection found, by (pool, rank)
    keepers:   ranks that have made rows and keep them for unfinished calls
    """
    waiting = [rank for rank in error.missing if (s := seen.get((pool, rank))) and s.waits]
    if waiting:
        producers = [*(each for each in keepers if not _can_answer(each, seen)), *producers]
    late = [rank for rank in error.missing if rank not in waiting] or error.missing
    hosts = [host for rank, host in zip(error.missing, error.hosts, strict=False) if rank in late]
    parts = _describe_states({rank: seen.get((pool, rank)) for rank in error.missing})
    if producers:
        parts.append("waiting for " + ", ".join(each.rows for each in producers))
        for each in producers:
            if each.pool != pool or each.rank not in error.missing:
                state = _describe_states({each.rank: seen.get((each.pool, each.rank))})
                parts += [f"{each.pool} {said}" for said in state]
    if any(seen.values()):
        parts.append("the logs of all ranks have their stacks")
    what = error.what
    if len(waiting) == len(error.missing) and (makers := _late_producers(producers, seen)):
        parts[0] = f"{what}: {parts[0]}"
        what, late, hosts = makers[0].call, [m.rank for m in makers], [m.host for m in makers]
    return RuntimeTimeout(what, error.seconds, late, "; ".join(parts), hosts)


def _can_answer(worker: Origin, seen: Mapping[tuple[str, int], Sighting]) -> bool:
    """Return whether a worker can answer calls.

    False if its host did not answer, or if inspection found it stopped, gone or silent.
    """
    sighting = seen.get((worker.pool, worker.rank))
    return sighting is not None and sighting.state not in (STOPPED, GONE, SILENT)


def _late_producers(
    producers: Sequence[Origin], seen: Mapping[tuple[str, int], Sighting]
) -> list[Origin]:
    """Return the producers that were not seen waiting for other ranks; empty where all wait.

    Only producers of one call, that of the first such producer, and each rank once.
    """
    late = [p for p in producers if not ((s := seen.get((p.pool, p.rank))) and s.waits)]
    return list({p.rank: p for p in late if p.call == late[0].call}.values())


def explain_death(error: WorkerError, oom_kills: int) -> WorkerError:
    """Return a copy of a dead process's error with a note that its host ran out of memory.

    `error` itself where the process did not die, or `oom_kills` is 0.
    oom_kills: processes that the host's kernel killed for lack of memory since the worker started
    """
    if not error.cause.startswith(DIED) or not oom_kills:
        return error
    cause = f"{error.cause}; its host ran out of memory: the kernel killed {oom_kills} of its "
    cause += "processes meanwhile"
    return WorkerError(
        error.role, error.rank, error.host, error.phase, cause, error.remote_traceback
    )


def _describe_states(seen: Mapping[int, Sighting | None]) -> list[str]:
    """Return a text for each state: `rank 0 is gone`, `each of ranks 1, 2 waits for others in ...`.

    seen: by rank; None = "is on a node that does not answer"
    """
    by_state: dict[str, list[int]] = {}
    for rank, sighting in seen.items():
        state = sighting.state if sighting else "is on a node that does not answer"
        by_state.setdefault(state, []).append(rank)
    return [
        f"{'rank' if len(ranks) == 1 else 'each of ranks'} {', '.join(map(str, ranks))} {state}"
        for state, ranks in by_state.items()
    ]


def read_tail(log: str) -> str:
    """Return the last TAIL_BYTES of a log as text; empty where it cannot be read."""
    return _read_from(log, max(0, _log_size(log) - TAIL_BYTES))


def _read_from(log: str, offset: int) -> str:
    """Return the text of a log from byte `offset` on; empty where it cannot be read."""
    try:
        with open(log, "rb") as file:
            file.seek(offset)
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def copy_logs(workers: Sequence[Watched], seen: Mapping[tuple[str, int], Sighting]) -> None:
    """Write the ends of logs that are not on this host to the same paths here.

    A heading with FETCHED and the host comes first. Earlier copies are replaced; other existing
    files, as the logs of this host's workers, are not changed. Workers without a log, with an empty
    one, or not in `seen` are left out. Raises OSError.
    """
    for worker in workers:
        sighting = seen.get((worker.pool, worker.rank))
        if sighting is None or not sighting.tail or not worker.log:
            continue
        file = Path(worker.log)
        if not file.exists() or _is_copy(file):
            mode = mode_within(file.parents[1])
            make_private_folder(file.parent, mode)
            heading = f"{FETCHED}{worker.place.host}]\n"
            replace_file(file, (heading + sighting.tail).encode("utf-8", "replace"), mode)


def _is_copy(file: Path) -> bool:
    """Return whether the file begins with the mark that `copy_logs` writes into its copies."""
    with open_file(file, "r", encoding="utf-8", errors="replace") as stream:
        return bool(stream.read(len(FETCHED)) == FETCHED)


def oom_kills() -> int:
    """Return how many processes of this host or container the kernel killed for lack of memory.

    It is the larger count of /proc/vmstat and the cgroup's memory.events; 0 if neither is readable.
    """
    found = 0
    for name in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        try:
            lines = Path(name).read_text(encoding="ascii").splitlines()
        except (OSError, ValueError):
            continue
        counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
        found = max(found, int(counts.get("oom_kill", "0")))
    return found


def _state_letter(pid: int) -> str:
    """Return the one-letter state of a process in /proc, such as R, S, D, T = stopped, Z = zombie.

    X = no such process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X"
    return text.rpartition(")")[2].split()[0]


def _request_stacks(pid: int) -> bool:
    """Send STACK_SIGNAL to a process; return False where it cannot be signalled."""
    try:
        os.kill(pid, STACK_SIGNAL)
    except OSError:
        return False
    return True


def _log_size(log: str) -> int:
    """Return the size of a log in bytes; 0 where there is none."""
    try:
        return os.stat(log).st_size
    except OSError:
        return 0


def _stack_since(log: str, offset: int) -> str:
    """Return the text of a log from byte `offset` on if it contains a stack, else ""."""
    text = _read_from(log, offset)
    return text if THREAD.search(text) else ""
