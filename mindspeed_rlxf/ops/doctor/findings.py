"""What a check says, and running checks so that none can hold up or break another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum


class Status(Enum):
    """Values are the words of the JSON report; the order is from best to worst."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"

    @property
    def badness(self) -> int:
        return list(Status).index(self)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    check:  stable name, `area.what`
    value:  what was found
    remedy: what to do about it; empty where it is ok
    hosts:  where it was found; empty = the host of the command
    """

    check: str
    status: Status
    value: str
    remedy: str = ""
    hosts: tuple[str, ...] = ()

    def on(self, host: str) -> Finding:
        return replace(self, hosts=(host,))


def ok(check: str, value: str) -> Finding:
    return Finding(check, Status.OK, value)


def warning(check: str, value: str, remedy: str) -> Finding:
    return Finding(check, Status.WARNING, value, remedy)


def error(check: str, value: str, remedy: str) -> Finding:
    return Finding(check, Status.ERROR, value, remedy)


@dataclass(frozen=True)
class Probe:
    """A check, or several that share what they read.

    look:       returns findings; whatever it raises is a finding too
    deadline_s: after this it is given up; its thread stays behind and does not hold up the exit
    """

    name: str
    look: Callable[[], Sequence[Finding]]
    deadline_s: float = 10.0


def run_probes(probes: Sequence[Probe]) -> list[Finding]:
    """Findings of all probes in their order. All run at once, each with its own deadline."""
    answers: list[list[Finding] | None] = [None] * len(probes)
    started = time.monotonic()
    threads = []
    for index, probe in enumerate(probes):
        thread = threading.Thread(target=_answer, args=(probe, answers, index), daemon=True)
        thread.start()
        threads.append(thread)
    found: list[Finding] = []
    for index, (probe, thread) in enumerate(zip(probes, threads, strict=True)):
        thread.join(max(started + probe.deadline_s - time.monotonic(), 0))
        answer = answers[index]
        found += [_too_late(probe)] if answer is None else answer
    return found


def _answer(probe: Probe, answers: list[list[Finding] | None], index: int) -> None:
    try:
        answers[index] = list(probe.look())
    except Exception as problem:
        said = " ".join(str(problem).split())
        answers[index] = [
            warning(
                probe.name,
                f"the check itself failed ({type(problem).__name__}: {said})",
                "look at this by hand",
            )
        ]


def _too_late(probe: Probe) -> Finding:
    return warning(
        probe.name,
        f"no answer within {probe.deadline_s:g} s",
        "what it asks hangs or is very slow: look at this by hand",
    )


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Equal findings of several hosts as one that names them all, in the order of the first."""
    together: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts = together.setdefault(replace(finding, hosts=()), [])
        hosts += [host for host in finding.hosts if host not in hosts]
    return [replace(finding, hosts=tuple(hosts)) for finding, hosts in together.items()]
