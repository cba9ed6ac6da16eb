"""The findings for people and for programs."""

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
    """host: of the command; build: version and source hash of this package."""

    host: str
    build: str
    time: str
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """1 when there is an error; warnings alone are 0."""
        bad = any(finding.status is Status.ERROR for finding in self.findings)
        return EXIT_ERRORS if bad else EXIT_FINE

    @property
    def counts(self) -> Mapping[str, int]:
        found = Counter(finding.status for finding in self.findings)
        return {status.value: found[status] for status in Status}

    def as_json(self) -> dict[str, Any]:
        """Keys are only ever added under the same `schema`."""
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
        """One line per finding, worst first, the remedy under what needs one."""
        ranked = sorted(self.findings, key=lambda finding: -finding.status.badness)
        checks = max((len(finding.check) for finding in ranked), default=0)
        lines = [_lines(finding, checks, width, colour) for finding in ranked]
        counts = self.counts
        total = ", ".join(
            f"{counts[status.value]} {_plural(status, counts[status.value])}"
            for status in reversed(Status)
        )
        return "\n".join([*lines, "", f"{self.host}: {total}  ({self.build})"])


def make_report(findings: Sequence[Finding]) -> Report:
    """Of now, this host and this installation."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Report(socket.gethostname(), build_id(), now, tuple(findings))


def _plural(status: Status, count: int) -> str:
    return status.value if status is Status.OK or count == 1 else f"{status.value}s"


def _lines(finding: Finding, checks: int, width: int, colour: bool) -> str:
    word = f"{finding.status.value:<7}"
    if colour:
        word = f"\033[{COLOURS[finding.status]}m{word}\033[0m"
    margin = 7 + 2 + checks + 2
    room = max(width - margin, 30)
    value = printable(finding.value + _where(finding.hosts))
    first, *rest = _wrapped(value, room) or [""]
    lines = [f"{word}  {printable(finding.check):<{checks}}  {first}"]
    lines += [" " * margin + line for line in rest]
    if finding.remedy:
        wrapped = _wrapped(printable(finding.remedy), room - 3)
        lines += [" " * margin + ("-> " if i == 0 else "   ") + x for i, x in enumerate(wrapped)]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    """Paths and commands stay whole, so that they can be copied."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _where(hosts: Sequence[str]) -> str:
    if not hosts:
        return ""
    shown = ", ".join(hosts[:SHOWN_HOSTS])
    more = len(hosts) - SHOWN_HOSTS
    return f"  [{shown}, and {more} more]" if more > 0 else f"  [{shown}]"


def wants_colour(stream: TextIO) -> bool:
    """On a terminal, unless NO_COLOR or a dumb terminal says otherwise."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


def line_width(stream: TextIO) -> int:
    return min(shutil.get_terminal_size().columns, 120) if stream.isatty() else 100
