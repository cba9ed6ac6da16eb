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
    together: dict[Finding, dict[str, None]] = {}
    for finding in findings:
        together.setdefault(replace(finding, hosts=()), {}).update(dict.fromkeys(finding.hosts))
    return [replace(finding, hosts=tuple(hosts)) for finding, hosts in together.items()]


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if there is an error, else 0; warnings do not count."""
    return int(any(finding.status is Status.ERROR for finding in findings))


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Build the report for `json.dump`; keys may be added, not removed or redefined."""
    host, counts = socket.gethostname(), Counter(finding.status for finding in findings)
    return {
        "schema": 1,  # rises when a field changes its meaning or goes away
        "host": host,
        "build": build_id(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "exit_code": exit_code(findings),
        "counts": {status.value: counts[status] for status in Status},
        "findings": [{**asdict(each), "hosts": list(each.hosts) or [host]} for each in findings],
    }


def as_text(findings: Sequence[Finding]) -> str:
    """Format one entry per finding, errors first, each with its hint; then the counts."""
    ranked = sorted(findings, key=lambda f: list(Status).index(f.status), reverse=True)
    margin = max((len(finding.check) for finding in ranked), default=0) + 11
    lines = []
    for finding in ranked:
        more = len(finding.hosts) - SHOWN_HOSTS
        hosts = [*finding.hosts[:SHOWN_HOSTS], *([f"and {more} more"] if more > 0 else [])]
        head = f"{finding.status.value:<7}  {finding.check}".ljust(margin)
        lines.append(head + finding.value + (f"  [{', '.join(hosts)}]" if hosts else ""))
        if finding.remedy:
            lines.append(f"{'':{margin}}-> {finding.remedy}")
    counts = Counter(finding.status for finding in findings)
    bad, doubtful, good = (counts[status] for status in reversed(Status))
    total = f"{bad} error{'s' * (bad != 1)}, {doubtful} warning{'s' * (doubtful != 1)}, {good} ok"
    return "\n".join([*lines, "", f"{socket.gethostname()}: {total}  ({build_id()})"])
