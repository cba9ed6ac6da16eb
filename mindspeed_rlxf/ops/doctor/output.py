"""The doctor's report: findings as text and as JSON."""

import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

from mindspeed_rlxf.cluster.nodes import build_id
from mindspeed_rlxf.device.findings import Finding, Status

SCHEMA = 1  # of `as_json`: rises when a field changes its meaning or goes away
SHOWN_HOSTS = 4


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings that differ only in their hosts into one with all hosts; keep the order."""
    together: dict[Finding, dict[str, None]] = {}
    for finding in findings:
        together.setdefault(replace(finding, hosts=()), {}).update(dict.fromkeys(finding.hosts))
    return [replace(finding, hosts=tuple(hosts)) for finding, hosts in together.items()]


@dataclass(frozen=True)
class Report:
    """Findings of one command.

    Attributes:
        host: name of the host that the command ran on.
        build: version and source hash of this package.
        time: UTC, ISO 8601.
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

    def as_text(self) -> str:
        """Return one entry per finding, errors first, each with its remedy; then the counts."""
        ranked = sorted(self.findings, key=lambda f: list(Status).index(f.status), reverse=True)
        margin = max((len(finding.check) for finding in ranked), default=0) + 11
        lines = []
        for finding in ranked:
            more = len(finding.hosts) - SHOWN_HOSTS
            hosts = [*finding.hosts[:SHOWN_HOSTS], *([f"and {more} more"] if more > 0 else [])]
            head = f"{finding.status.value:<7}  {finding.check}".ljust(margin)
            lines.append(head + finding.value + (f"  [{', '.join(hosts)}]" if hosts else ""))
            if finding.remedy:
                lines.append(f"{'':{margin}}-> {finding.remedy}")
        bad, doubtful, good = (self.counts[status.value] for status in reversed(Status))
        total = (
            f"{bad} error{'s' * (bad != 1)}, {doubtful} warning{'s' * (doubtful != 1)}, {good} ok"
        )
        return "\n".join([*lines, "", f"{self.host}: {total}  ({self.build})"])


def make_report(findings: Sequence[Finding]) -> Report:
    """Return a Report of the findings, with the current time, this host and this build."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Report(socket.gethostname(), build_id(), now, tuple(findings))
