"""Diagnose workers from outside the process when one hangs or has died, by their hosts' agents.

The workers themselves are not called: a stopped process, or one stuck in C, answers nothing. A
signal makes Python write the stack of every thread of a worker to its log, even when it is stuck
in C. The process table has the rest. Free of Ray.
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

ANSWER_S = 30.0  # deadline of a host, whose agent may have to start first
STACK_SIGNAL = signal.SIGUSR2
FETCHED = "[the end of this log, fetched from "  # start of a copied log
STDERR = 2
STACK_S = 2.0  # longest wait for the stacks in the logs
TAIL_BYTES = 64 * 1024  # of each log that are sent to the driver

STOPPED = "is stopped (SIGSTOP, or a debugger)"
GONE = "is gone"
SILENT = "answers no signal (stuck in the kernel, perhaps in a driver or a file system)"

FRAME = re.compile(r'^  File "(?P<file>.+)", line \d+ in (?P<function>.+)$', re.MULTILINE)
THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)


@dataclass(frozen=True)
class Subject:
    """A worker process on this host. log: its file; empty = unknown"""

    rank: int
    pid: int
    log: str


@dataclass(frozen=True)
class Sighting:
    """The state of a worker, as seen from its host."""

    rank: int
    state: str  # as in `rank 1 is gone`
    waits: bool  # for other ranks, so that these are the late ones
    tail: str  # of the log
    oom_kills: int = 0  # of its host, for lack of memory, so far


@dataclass(frozen=True)
class Watched:
    """A worker by its pool and rank. log: its file on its host; empty = unknown"""

    pool: str
    rank: int
    place: Place
    log: str
    agent: HostAgent


def show_stacks_on_signal() -> None:
    """Make this process write all its stacks to stderr on STACK_SIGNAL, and on a crash in C."""
    faulthandler.enable(STDERR)
    faulthandler.register(STACK_SIGNAL, STDERR, all_threads=True)


def inspect_hosts(workers: Sequence[Watched], stacks: bool) -> dict[tuple[str, int], Sighting]:
    """Inspect workers on their hosts; by (pool, rank), of the hosts that answer in time.

    stacks: as in `inspect_workers`
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
    """Inspect workers of this host. stacks: have each write its stacks to its log"""
    kills = oom_kills()
    before = {subject.rank: _size(subject.log) for subject in subjects}
    asked = [s for s in subjects if stacks and _letter(s.pid) not in "TtZX" and _signal(s.pid)]
    deadline = time.monotonic() + STACK_S
    sizes: list[int] = []
    while time.monotonic() < deadline:
        time.sleep(0.1)
        seen, sizes = sizes, [_size(s.log) for s in asked]
        if sizes == seen and all(_stack_since(s.log, before[s.rank]) for s in asked if s.log):
            break
    found = []
    for subject in subjects:
        stack = _stack_since(subject.log, before[subject.rank]) if subject in asked else ""
        state, waits = _describe_state(subject, stack, subject in asked)
        found.append(Sighting(subject.rank, state, waits, read_tail(subject.log), kills))
    return found


def _describe_state(subject: Subject, stack: str, asked: bool) -> tuple[str, bool]:
    """Return what the process does, as words for a message, and whether it waits for other ranks.

    stack: what it wrote when asked for its stacks; empty = it wrote nothing
    """
    letter = _letter(subject.pid)
    if letter in "ZX":
        return GONE, False
    if letter in "Tt":
        return STOPPED, False
    if not asked or not subject.log:
        return "is alive", False
    return describe_stack(stack) if stack else (SILENT, False)


def describe_stack(stack: str) -> tuple[str, bool]:
    """Describe the thread that runs roles, and whether it waits for other ranks.

    stack: the stacks of all threads, as `faulthandler` writes them
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
) -> RuntimeTimeout:
    """Return the timeout with the states of its ranks, without the ranks that waited for others.

    Where all of them waited for rows, it becomes the timeout of the ranks that make the rows.

    pool:      of the error's ranks
    producers: ranks whose rows are waited for
    seen:      by (pool, rank)
    """
    waiting = [rank for rank in error.missing if (s := seen.get((pool, rank))) and s.waits]
    late = [rank for rank in error.missing if rank not in waiting] or error.missing
    hosts = [host for rank, host in zip(error.missing, error.hosts, strict=False) if rank in late]
    parts = _states({rank: seen.get((pool, rank)) for rank in error.missing})
    if producers:
        parts.append("waiting for " + ", ".join(each.rows for each in producers))
        for each in producers:
            if each.pool != pool:
                state = _states({each.rank: seen.get((each.pool, each.rank))})
                parts += [f"{each.pool} {said}" for said in state]
    if any(seen.values()):
        parts.append("the logs of all ranks have their stacks")
    what = error.what
    if len(waiting) == len(error.missing) and (makers := _late_producers(producers, seen)):
        parts[0] = f"{what}: {parts[0]}"
        what, late, hosts = makers[0].call, [m.rank for m in makers], [m.host for m in makers]
    return RuntimeTimeout(what, error.seconds, late, "; ".join(parts), hosts)


def _late_producers(
    producers: Sequence[Origin], seen: Mapping[tuple[str, int], Sighting]
) -> list[Origin]:
    """Return the producers of the first late call that do not wait for others themselves."""
    late = [p for p in producers if not ((s := seen.get((p.pool, p.rank))) and s.waits)]
    return list({p.rank: p for p in late if p.call == late[0].call}.values())


def explain_death(error: WorkerError, oom_kills: int) -> WorkerError:
    """Return the error, with a lack of memory where the process died and its host had one.

    oom_kills: processes that the kernel of the host killed since the worker started
    """
    if not error.cause.startswith(DIED) or not oom_kills:
        return error
    cause = f"{error.cause}; its host ran out of memory: the kernel killed {oom_kills} of its "
    cause += "processes meanwhile"
    return WorkerError(
        error.role, error.rank, error.host, error.phase, cause, error.remote_traceback
    )


def _states(seen: Mapping[int, Sighting | None]) -> list[str]:
    """Describe ranks by state: `rank 0 is gone`, `each of ranks 1, 2 waits for others in ...`."""
    by_state: dict[str, list[int]] = {}
    for rank, sighting in seen.items():
        state = sighting.state if sighting else "is on a node that does not answer"
        by_state.setdefault(state, []).append(rank)
    return [
        f"{'rank' if len(ranks) == 1 else 'each of ranks'} {', '.join(map(str, ranks))} {state}"
        for state, ranks in by_state.items()
    ]


def read_tail(log: str) -> str:
    """Return the last `TAIL_BYTES` of a log; empty where there is none."""
    return _read_from(log, max(0, _size(log) - TAIL_BYTES))


def _read_from(log: str, offset: int) -> str:
    """Read a log from a byte on; empty where it cannot be read."""
    try:
        with open(log, "rb") as file:
            file.seek(offset)
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def copy_logs(workers: Sequence[Watched], seen: Mapping[tuple[str, int], Sighting]) -> None:
    """Copy the ends of logs from other hosts to the same paths here; own logs stay."""
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
    with open_file(file, "r", encoding="utf-8", errors="replace") as stream:
        return bool(stream.read(len(FETCHED)) == FETCHED)


def oom_kills() -> int:
    """Count the processes of this host or container that the kernel killed for lack of memory."""
    found = 0
    for name in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        try:
            lines = Path(name).read_text(encoding="ascii").splitlines()
        except (OSError, ValueError):
            continue
        counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
        found = max(found, int(counts.get("oom_kill", "0")))
    return found


def _letter(pid: int) -> str:
    """Return the state letter of /proc: R, S, D, T(stopped), Z(ombie); X = no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X"
    return text.rpartition(")")[2].split()[0]


def _signal(pid: int) -> bool:
    """Ask a process for its stacks; False where it cannot be signalled."""
    try:
        os.kill(pid, STACK_SIGNAL)
    except OSError:
        return False
    return True


def _size(log: str) -> int:
    """Return the bytes of a log; 0 where there is none."""
    try:
        return os.stat(log).st_size
    except OSError:
        return 0


def _stack_since(log: str, offset: int) -> str:
    """Return the text after `offset` where it has a stack, else nothing."""
    text = _read_from(log, offset)
    return text if THREAD.search(text) else ""
