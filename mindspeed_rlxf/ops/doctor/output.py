"""The doctor's report as text and as JSON."""

import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import Any

from mindspeed_rlxf.cluster.nodes import build_id
from mindspeed_rlxf.device.findings import Finding, Status

SHOWN_HOSTS = 4


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings that differ only in their hosts, in order."""
    hosts_of: dict[Finding, dict[str, None]] = {}
    for finding in findings:
        hosts = hosts_of.setdefault(replace(finding, hosts=()), {})
        hosts.update(dict.fromkeys(finding.hosts))
    return [replace(finding, hosts=tuple(hosts)) for finding, hosts in hosts_of.items()]


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if there is an error, else 0; warnings do not count."""
    return int(any(finding.status is Status.ERROR for finding in findings))


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Build the report for `json.dump`; keys may be added, not removed or redefined."""
    host = socket.gethostname()
    counts = Counter(finding.status for finding in findings)
    return {
        "schema": 1,  # rises when a field changes its meaning or goes away
        "host": host,
        "build": build_id(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "exit_code": exit_code(findings),
        "counts": {status.value: counts[status] for status in Status},
        "findings": [
            {**asdict(finding), "hosts": list(finding.hosts) or [host]} for finding in findings
        ],
    }


def as_text(findings: Sequence[Finding]) -> str:
    """Format one entry per finding, errors first, each with its hint; then the counts."""
    ranked = sorted(findings, key=lambda f: list(Status).index(f.status), reverse=True)
    margin = max((len(finding.check) for finding in ranked), default=0) + 11
    lines = []
    for finding in ranked:
        hosts = list(finding.hosts[:SHOWN_HOSTS])
        num_unlisted = len(finding.hosts) - len(hosts)
        if num_unlisted > 0:
            hosts.append(f"and {num_unlisted} more")
        line = f"{finding.status.value:<7}  {finding.check}".ljust(margin) + finding.value
        if hosts:
            line += f"  [{', '.join(hosts)}]"
        lines.append(line)
        if finding.remedy:
            lines.append(f"{'':{margin}}-> {finding.remedy}")
    counts = Counter(finding.status for finding in findings)
    errors = counts[Status.ERROR]
    warnings = counts[Status.WARNING]
    summary = (
        f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}, "
        f"{counts[Status.OK]} ok"
    )
    return "\n".join([*lines, "", f"{socket.gethostname()}: {summary}  ({build_id()})"])
