"""Findings of the doctor's checks, and the report of them as text and as JSON."""

from __future__ import annotations

import socket
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from mindspeed_rlxf.cluster.installed import build_id

SCHEMA = 1  # of `as_json`: rises when a field changes its meaning or goes away
SHOWN_HOSTS = 4
MAX_MESSAGE = 300  # characters


class Status(str, Enum):
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


def describe(problem: BaseException) -> str:
    """Return type and message of an exception on one line, at most MAX_MESSAGE characters of it."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:MAX_MESSAGE]}"


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings that differ only in their hosts into one with all hosts; keep the order."""
    together: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts = together.setdefault(replace(finding, hosts=()), [])
        hosts += [host for host in finding.hosts if host not in hosts]
    return [replace(finding, hosts=tuple(hosts)) for finding, hosts in together.items()]


@dataclass(frozen=True)
class Report:
    """Findings of one command.

    host:  name of the host that the command ran on
    build: version and source hash of this package
    time:  UTC, ISO 8601
    """

    host: str
    build: str
    time: str
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """Return 1 if there is an error, else 0; warnings do not count."""
        return int(self.counts["error"] > 0)

    @property
    def counts(self) -> Mapping[str, int]:
        """Return the number of findings of each status, by its value such as "ok"."""
        found = Counter(finding.status for finding in self.findings)
        return {status.value: found[status] for status in Status}

    def as_json(self) -> dict[str, Any]:
        """Return the report for `json.dump`. Keys may be added, but not removed or redefined."""
        return {
            "schema": SCHEMA,
            "host": self.host,
            "build": self.build,
            "time": self.time,
            "exit_code": self.exit_code,
            "counts": self.counts,
            "findings": [
                {**asdict(finding), "hosts": list(finding.hosts) or [self.host]}
                for finding in self.findings
            ],
        }

    def as_text(self, width: int = 100) -> str:
        """Return one entry per finding, errors first, each with its remedy; then the counts."""
        ranked = sorted(self.findings, key=lambda f: list(Status).index(f.status), reverse=True)
        checks = max((len(finding.check) for finding in ranked), default=0)
        margin = " " * (7 + 2 + checks + 2)
        lines = []
        for finding in ranked:
            more = len(finding.hosts) - SHOWN_HOSTS
            hosts = [*finding.hosts[:SHOWN_HOSTS], *([f"and {more} more"] if more > 0 else [])]
            value = finding.value + (f"  [{', '.join(hosts)}]" if hosts else "")
            room = max(width - len(margin), 30)
            first, *rest = _wrap(value, room) or [""]
            rest += _wrap(finding.remedy, room, "-> ")
            lines.append(f"{finding.status.value:<7}  {finding.check:<{checks}}  {first}")
            lines += [margin + line for line in rest]
        counts = self.counts
        errors, warnings = (
            f"{counts[word]} {word}{'' if counts[word] == 1 else 's'}"
            for word in ("error", "warning")
        )
        total = f"{errors}, {warnings}, {counts['ok']} ok"
        return "\n".join([*lines, "", f"{self.host}: {total}  ({self.build})"])


def make_report(findings: Sequence[Finding]) -> Report:
    """Return a Report of the findings, with the current time, this host and this build."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Report(socket.gethostname(), build_id(), now, tuple(findings))


def _wrap(text: str, width: int, arrow: str = "") -> list[str]:
    """Wrap to lines, the first after `arrow`. Words stay whole, so that paths can be copied."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=arrow,
        subsequent_indent=" " * len(arrow),
        break_on_hyphens=False,
        break_long_words=False,
    )
