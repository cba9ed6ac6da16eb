"""Format the findings as text and as JSON."""

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
        return EXIT_ERRORS if self.counts["error"] else EXIT_FINE

    @property
    def counts(self) -> Mapping[str, int]:
        """Return status -> number of findings; 0 for statuses that none has.

        The keys are the values of `Status`, such as "ok".
        """
        found = Counter(finding.status for finding in self.findings)
        return {status.value: found[status] for status in Status}

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dictionary that can be written as JSON.

        A finding without hosts gets the host of the command. Removing or redefining a key requires
        a new `schema` number; adding one does not.
        """
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
        """Return one entry per finding, errors first, each with its remedy.

        The last line has the host, the counts of errors, warnings and `ok`, and the build.
        width: columns; colour: add ANSI colours to the status words
        """
        ranked = sorted(self.findings, key=lambda f: list(Status).index(f.status), reverse=True)
        checks = max((len(finding.check) for finding in ranked), default=0)
        lines = [_format_finding(finding, checks, width, colour) for finding in ranked]
        counts = self.counts
        total = f"{_count(counts, 'error')}, {_count(counts, 'warning')}, {counts['ok']} ok"
        return "\n".join([*lines, "", f"{self.host}: {total}  ({self.build})"])


def make_report(findings: Sequence[Finding]) -> Report:
    """Return a Report of the findings, with the current time, this host and this build."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Report(socket.gethostname(), build_id(), now, tuple(findings))


def _count(counts: Mapping[str, int], word: str) -> str:
    return f"{counts[word]} {word}{'' if counts[word] == 1 else 's'}"


def _format_finding(finding: Finding, check_width: int, width: int, colour: bool) -> str:
    """Format one finding: status, check name, value and hosts; on lines below, the remedy.

    check_width: columns of the check name
    width:       columns of a line; value and remedy get 30 columns even if that exceeds it
    """
    word = f"{finding.status.value:<7}"
    if colour:
        word = f"\033[{COLOURS[finding.status]}m{word}\033[0m"
    margin = 7 + 2 + check_width + 2
    room = max(width - margin, 30)
    value = printable(finding.value + _hosts(finding.hosts))
    lines = (_wrap(value, room) or [""]) + _wrap(printable(finding.remedy), room, "-> ")
    head = f"{word}  {printable(finding.check):<{check_width}}  "
    return "\n".join([head + lines[0], *(" " * margin + line for line in lines[1:])])


def _wrap(text: str, width: int, arrow: str = "") -> list[str]:
    """Wrap a text to lines, the first after `arrow`, the others indented by its length; [] for "".

    Words are never broken, so that paths and commands can be copied.
    """
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
    """Return whether `stream` is a terminal, TERM is not `dumb`, and NO_COLOR is unset or empty."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_plain


def line_width(stream: TextIO) -> int:
    """Return the width of a terminal, at most 120 columns; 100 for other streams."""
    return min(shutil.get_terminal_size().columns, 120) if stream.isatty() else 100
