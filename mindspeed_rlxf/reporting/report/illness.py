"""List the problems of a run: findings of health rules, failures, slow stretches, odd numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rlxf.reporting.health_rules import KL_LIMIT
from mindspeed_rlxf.reporting.metrics import read_jsonl
from mindspeed_rlxf.reporting.report.checks import check_ranges, replay
from mindspeed_rlxf.reporting.report.records import Iteration
from mindspeed_rlxf.reporting.report.slowness import explain, find_slow_stretches

HEALTH = "health.jsonl"

Finding = dict[str, Any]


def find_illnesses(
    run: Path,
    iterations: Sequence[Iteration],
    failures: Sequence[Mapping[str, Any]],
    kl_limit: float = KL_LIMIT,
) -> list[Finding]:
    """Return findings with level (bad or watch), iteration, text and remedy; bad ones first."""
    found = [
        *_failure_findings(failures),
        *_health_findings(run, iterations, kl_limit),
        *_slowness_findings(iterations),
        *_non_finite_findings(iterations),
        *_range_findings(iterations),
    ]
    return sorted(found, key=lambda finding: finding["level"])  # "bad" comes before "watch"


def _failure_findings(failures: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for failure in failures:
        when, ends = failure.get("iteration"), bool(failure.get("last"))
        text = f"{'failed' if ends else 'failed, then started again'}: {failure.get('message', '')}"
        yield _finding("bad" if ends else "watch", when, text, "see failures below")


def _health_findings(
    run: Path, iterations: Sequence[Iteration], kl_limit: float
) -> Iterator[Finding]:
    """Yield a finding per problem in health.jsonl; without this file, by the health rules."""
    if (run / HEALTH).exists():
        events = list(read_jsonl(run / HEALTH))
    else:
        events = [vars(finding) for finding in replay(iterations, kl_limit)[1]]
    begun: dict[str, int] = {}  # rule -> index of its beginning that has no end yet
    ends: dict[int, Any] = {}  # index of a beginning -> iteration in which it ended
    for i, event in enumerate(events):
        rule = str(event.get("rule"))
        if event.get("event") == "began":
            begun[rule] = i
        elif event.get("event") == "ended" and rule in begun:
            ends[begun.pop(rule)] = event.get("iteration")
    for i, event in enumerate(events):
        if event.get("event") == "began":
            text = f"{event.get('rule')}: {event.get('text')}"
            text += f" (ended in iteration {ends[i]})" if i in ends else ""
            level, remedy = "watch" if i in ends else "bad", str(event.get("remedy", ""))
            yield _finding(level, event.get("iteration"), text, remedy)


def _non_finite_findings(iterations: Sequence[Iteration]) -> Iterator[Finding]:
    first: dict[str, int] = {}
    counts: dict[str, int] = {}
    for each in iterations:
        for name, value in each.metrics.items():
            if value is None:
                first.setdefault(name, each.number)
                counts[name] = counts.get(name, 0) + 1
    for name, count in counts.items():
        text = f"{name} is no finite number in {count} of {len(iterations)} iterations"
        yield _finding("bad", first[name], text, "look at the first of them; training.nan_policy")


def _slowness_findings(iterations: Sequence[Iteration]) -> Iterator[Finding]:
    for each in find_slow_stretches(iterations):
        yield _finding("watch", each.first, each.text, explain(iterations, each))


def _range_findings(iterations: Sequence[Iteration]) -> Iterator[Finding]:
    for each in check_ranges(iterations):
        if each.is_found:
            low, high = each.metric.healthy or (None, None)
            limit = f"under {low:g}" if low is not None and each.mean < low else f"over {high:g}"
            text = f"{each.name} is {each.mean:.3g} in the last {each.last} iterations, {limit}"
            yield _finding("watch", each.begin, text, each.metric.remedy)


def _finding(level: str, iteration: Any, text: str, remedy: str) -> Finding:
    return {"level": level, "iteration": iteration, "text": text, "remedy": remedy}
