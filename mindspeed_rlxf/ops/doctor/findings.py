"""Findings of checks; run checks in threads with deadlines, so that one failure stops no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from queue import Empty, Queue

MAX_MESSAGE = 300  # characters


class Status(Enum):
    """Judgement of a check, from best to worst; the values appear in the JSON report."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    check:  stable name, `area.subject`
    value:  what was measured or seen
    remedy: what to do; "" if ok
    hosts:  hosts with this result; empty = the host of the command
    """

    check: str
    status: Status
    value: str
    remedy: str = ""
    hosts: tuple[str, ...] = ()

    def on(self, host: str) -> Finding:
        """Return a copy that names this one host."""
        return replace(self, hosts=(host,))


def ok(check: str, value: str) -> Finding:
    return Finding(check, Status.OK, value)


def warning(check: str, value: str, remedy: str) -> Finding:
    return Finding(check, Status.WARNING, value, remedy)


def error(check: str, value: str, remedy: str) -> Finding:
    return Finding(check, Status.ERROR, value, remedy)


def judge(fine: bool, check: str, value: str, remedy: str, bad: Status = Status.WARNING) -> Finding:
    """Return an `ok` finding if `fine`, else one of status `bad` with the remedy."""
    return ok(check, value) if fine else Finding(check, bad, value, remedy)


@dataclass(frozen=True)
class Probe:
    """One or more checks that run in a thread of their own.

    look:       returns findings; an exception becomes a warning
    deadline_s: after it a warning is reported; the thread goes on and ends with the process
    """

    name: str
    look: Callable[[], Finding | Iterable[Finding]]
    deadline_s: float = 10.0


def run_probes(probes: Sequence[Probe]) -> list[Finding]:
    """Run all probes at once in threads; return their findings in the order of `probes`.

    Waits until each has answered or its deadline has passed; a late one becomes a warning.
    """
    started = time.monotonic()
    queues: list[Queue[list[Finding]]] = [Queue() for _ in probes]
    for probe, queue in zip(probes, queues, strict=True):
        threading.Thread(target=_run_probe, args=(probe, queue), daemon=True).start()
    found: list[Finding] = []
    for probe, queue in zip(probes, queues, strict=True):
        try:
            found += queue.get(timeout=max(started + probe.deadline_s - time.monotonic(), 0))
        except Empty:
            value = f"no answer within {probe.deadline_s:g} s"
            remedy = "what the check asks hangs or is very slow: check it by hand"
            found.append(warning(probe.name, value, remedy))
    return found


def _run_probe(probe: Probe, queue: Queue[list[Finding]]) -> None:
    """Call one probe and put its findings into the queue; an exception becomes a warning."""
    try:
        found = probe.look()
        queue.put([found] if isinstance(found, Finding) else list(found))
    except Exception as problem:
        value = f"the check itself failed ({describe(problem)})"
        queue.put([warning(probe.name, value, "check it by hand")])


def describe(problem: Exception) -> str:
    """Return type and message of an exception on one line; the message is cut to MAX_MESSAGE."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:MAX_MESSAGE]}"


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings that differ only in their hosts into one with all hosts; keep the order."""
    together: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts = together.setdefault(replace(finding, hosts=()), [])
        hosts += [host for host in finding.hosts if host not in hosts]
    return [replace(finding, hosts=tuple(hosts)) for finding, hosts in together.items()]
