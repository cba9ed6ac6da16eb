"""Report of the findings, as text and as JSON."""

from __future__ import annotations

import os
import shutil
import socket
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, TextIO

from mindspeed_rlxf.cluster.installed import build_id
from mindspeed_rlxf.files.printable import printable
from mindspeed_rlxf.ops.doctor.findings import Finding, Status

SCHEMA = 1  # of `as_json`: rises when a field changes its meaning or goes away
EXIT_FINE, EXIT_ERRORS = 0, 1
SHOWN_HOSTS = 4
COLOURS = {Status.OK: "32", Status.WARNING: "33", Status.ERROR: "31;1"}


@dataclass(frozen=True)
class Report:
    """Findings of one command. host: where it ran; build: version and source hash"""

    host: str
    build: str
    time: str
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """1 when there is an error; warnings alone are 0."""
        return EXIT_ERRORS if self.counts["error"] else EXIT_FINE

    @property
    def counts(self) -> Mapping[str, int]:
        found = Counter(finding.status for finding in self.findings)
        return {status.value: found[status] for status in Status}

    def as_json(self) -> dict[str, Any]:
        """Return the report for JSON; keys are only ever added under the same `schema`."""
        return {
            "schema": SCHEMA,
            "host": self.host,
            "build": self.build,
            "time": self.time,
            "exit_code": self.exit_code,
            "counts": dict(self.counts),
            "findings": [
                {
                    "check": finding.check,
                    "status": finding.status.value,
                    "value": finding.value,
                    "remedy": finding.remedy,
                    "hosts": list(finding.hosts) or [self.host],
                }
                for finding in self.findings
            ],
        }

    def as_text(self, width: int = 100, colour: bool = False) -> str:
        """Return one line per finding, worst first, with the remedy under what needs one."""
        ranked = sorted(self.findings, key=lambda f: list(Status).index(f.status), reverse=True)
        checks = max((len(finding.check) for finding in ranked), default=0)
        lines = [_lines(finding, checks, width, colour) for finding in ranked]
        counts = self.counts
        total = f"{_count(counts, 'error')}, {_count(counts, 'warning')}, {counts['ok']} ok"
        return "\n".join([*lines, "", f"{self.host}: {total}  ({self.build})"])


def make_report(findings: Sequence[Finding]) -> Report:
    """Report the findings with the time, this host and this installation."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Report(socket.gethostname(), build_id(), now, tuple(findings))


def _count(counts: Mapping[str, int], word: str) -> str:
    return f"{counts[word]} {word}{'' if counts[word] == 1 else 's'}"


def _lines(finding: Finding, checks: int, width: int, colour: bool) -> str:
    """Return the lines of one finding: status, check, value and hosts; below them the remedy."""
    word = f"{finding.status.value:<7}"
    if colour:
        word = f"\033[{COLOURS[finding.status]}m{word}\033[0m"
    margin = 7 + 2 + checks + 2
    room = max(width - margin, 30)
    value = printable(finding.value + _hosts(finding.hosts))
    lines = (_wrap(value, room) or [""]) + _wrap(printable(finding.remedy), room, "-> ")
    head = f"{word}  {printable(finding.check):<{checks}}  "
    return "\n".join([head + lines[0], *(" " * margin + line for line in lines[1:])])


def _wrap(text: str, width: int, arrow: str = "") -> list[str]:
    """Wrap a text to lines; paths and commands stay whole, so that they can be copied."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=arrow,
        subsequent_indent=" " * len(arrow),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _hosts(hosts: Sequence[str]) -> str:
    more = [f"and {len(hosts) - SHOWN_HOSTS} more"] if len(hosts) > SHOWN_HOSTS else []
    return f"  [{', '.join([*hosts[:SHOWN_HOSTS], *more])}]" if hosts else ""


def wants_colour(stream: TextIO) -> bool:
    """Whether `stream` is a terminal with colours, and NO_COLOR is not set."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_plain


def line_width(stream: TextIO) -> int:
    return min(shutil.get_terminal_size().columns, 120) if stream.isatty() else 100
