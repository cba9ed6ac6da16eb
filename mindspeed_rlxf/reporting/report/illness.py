"""List the problems of a run: findings of health rules, failures, numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rlxf.reporting.health import LAG_SHARE, Health
from mindspeed_rlxf.reporting.metric_table import find_metric
from mindspeed_rlxf.reporting.report.records import Iteration, read_records

LATELY = 10  # iterations
HEALTH = "health.jsonl"

Finding = dict[str, Any]


def find_illnesses(
    run: Path, iterations: Sequence[Iteration], failures: Sequence[Mapping[str, Any]]
) -> list[Finding]:
    """Return findings: level (bad, or watch), iteration, text, remedy; the worst first."""
    found = [
        *_failures(failures),
        *_rules(run, iterations),
        *_not_finite(iterations),
        *_out_of_range(iterations),
    ]
    return sorted(found, key=lambda finding: finding["level"])  # "bad" comes before "watch"


def _failures(failures: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for failure in failures:
        when, ends = failure.get("iteration"), bool(failure.get("last"))
        text = f"{'failed' if ends else 'failed, then started again'}: {failure.get('message', '')}"
        yield _finding("bad" if ends else "watch", when, text, "see failures below")


def _rules(run: Path, iterations: Sequence[Iteration]) -> Iterator[Finding]:
    """Yield the findings in health.jsonl; without this file, apply the rules to the metrics."""
    if (run / HEALTH).exists():
        events = [dict(each) for each in read_records(run / HEALTH)]
    else:
        health = Health()
        events = [
            vars(finding)
            for each in iterations
            if each.number > 0
            for finding in health.check(each.number, each.metrics)
        ]
    ended = {e.get("rule"): e.get("iteration") for e in events if e.get("event") == "ended"}
    for event in events:
        if event.get("event") != "began":
            continue
        began, end = event.get("iteration"), ended.get(event.get("rule"))
        over = isinstance(end, int) and isinstance(began, int) and end > began
        text = f"{event.get('rule')}: {event.get('text')}"
        text += f" (ended in iteration {end})" if over else ""
        yield _finding("watch" if over else "bad", began, text, str(event.get("remedy", "")))


def _not_finite(iterations: Sequence[Iteration]) -> Iterator[Finding]:
    """Yield metrics that were NaN or infinite, with the first iteration of each."""
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


def _out_of_range(iterations: Sequence[Iteration]) -> Iterator[Finding]:
    """Yield metrics whose mean over the last iterations is outside their healthy range."""
    lately = [each for each in iterations if each.number > 0][-LATELY:]
    means = _means(lately)
    whole = means.get("timing/all", 0.0)
    for name, mean in sorted(means.items()):
        metric, phase = find_metric(name), name.removeprefix("skew/")
        if metric is None or metric.healthy is None:
            continue
        if phase != name and means.get(f"timing/{phase}", 0.0) < LAG_SHARE * whole:
            continue  # the ranks of a phase that takes no time
        if not metric.is_healthy(mean):
            low, high = metric.healthy
            limit = f"under {low:g}" if low is not None and mean < low else f"over {high:g}"
            text = f"{name} is {mean:.3g} in the last {len(lately)} iterations, {limit}"
            yield _finding("watch", lately[0].number, text, metric.remedy)


def _means(iterations: Sequence[Iteration]) -> dict[str, float]:
    """Return the mean of each metric over its finite values."""
    names = {name for each in iterations for name in each.metrics}
    values = {n: [v for i in iterations if (v := i.metrics.get(n)) is not None] for n in names}
    return {name: sum(found) / len(found) for name, found in values.items() if found}


def _finding(level: str, iteration: Any, text: str, remedy: str) -> Finding:
    return {"level": level, "iteration": iteration, "text": text, "remedy": remedy}
