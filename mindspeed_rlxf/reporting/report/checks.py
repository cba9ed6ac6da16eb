"""List what was checked in a run: rules of health, iteration time, numbers, healthy ranges.

Each check names its limit and its outcome, so that "fine" differs from "not checked".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rlxf.reporting.health import Finding, Health
from mindspeed_rlxf.reporting.health_rules import LAG_SHARE, LIMITS, runaway_limit
from mindspeed_rlxf.reporting.metric_table import Metric, find_metric, show_range
from mindspeed_rlxf.reporting.report.curves import curve_of
from mindspeed_rlxf.reporting.report.records import Iteration
from mindspeed_rlxf.reporting.report.slowness import SLOW, TIME, WINDOW, find_slow_stretches

LATELY = 10  # iterations
TOO_FEW = "not checked: no values, or too few"

Check = dict[str, str]


@dataclass(frozen=True)
class RangeCheck:
    """A metric compared with its healthy range.

    mean:    over the last `last` iterations, from `begin` on; this decides
    outside: iterations with a value outside, of `count`; worst: the value farthest outside
    is_long: False for the skew of a phase that takes little time, which is no finding
    """

    name: str
    metric: Metric
    begin: int
    mean: float
    last: int
    outside: int
    count: int
    worst: float | None
    is_long: bool

    @property
    def is_found(self) -> bool:
        return self.is_long and not self.metric.is_healthy(self.mean)

    @property
    def text(self) -> str:
        text = f"{self.mean:.3g} in the last {self.last} iterations"
        if self.worst is not None:
            text += (
                f"; {self.outside} of {self.count} iterations outside, as far as {self.worst:.3g}"
            )
        if not self.is_long:
            text += f"; does not count: the phase takes under {LAG_SHARE:.0%} of the iteration"
        return text


def list_checks(iterations: Sequence[Iteration], config: Mapping[str, Any]) -> list[Check]:
    """Return name, limit, outcome and level (good, watch or plain) of each check of a run."""
    return [
        *_check_rules(iterations, read_kl_limit(config)),
        _time(iterations),
        _numbers(iterations),
        *(
            _check(
                each.name, f"healthy: {show_range(each.metric.healthy)}, by the mean of the last "
                f"{LATELY} iterations", each.text,
                "watch" if each.is_found else "good" if each.is_long else "plain",
            )
            for each in check_ranges(iterations)
        ),
    ]  # fmt: skip


def read_kl_limit(config: Mapping[str, Any]) -> float:
    """Return the KL, in nats per token, above which a run of this configuration is unhealthy."""
    target = config.get("algorithm.kl_ctrl.target_kl")
    adapts = config.get("algorithm.kl_ctrl.type") == "adaptive"
    return runaway_limit(adapts, float(target) if isinstance(target, (int, float)) else 0.0)


def replay(iterations: Sequence[Iteration], kl_limit: float) -> tuple[Health, list[Finding]]:
    """Apply the health rules to iterations from 1 on; return them and all findings."""
    health = Health(kl_limit=kl_limit)
    trained = (each for each in iterations if each.number > 0)
    return health, [f for each in trained for f in health.check(each.number, each.metrics)]


def check_ranges(iterations: Sequence[Iteration]) -> Iterator[RangeCheck]:
    """Yield a check of each metric with a healthy range and a value lately."""
    trained = [each for each in iterations if each.number > 0]
    lately = trained[-LATELY:]
    means = _mean_values(lately)
    for name, mean in sorted(means.items()):
        metric, phase = find_metric(name), name.removeprefix("skew/")
        if metric is None or metric.healthy is None:
            continue
        seconds, whole = means.get(f"timing/{phase}", 0.0), means.get(TIME, 0.0)
        values = [v for _, v in curve_of(trained, name)]
        outside = [v for v in values if not metric.is_healthy(v)]
        worst = max(outside, key=functools.partial(_measure_distance, metric), default=None)
        yield RangeCheck(
            name, metric, lately[0].number, mean, len(lately), len(outside), len(values), worst,
            phase == name or seconds >= LAG_SHARE * whole,
        )  # fmt: skip


def _check_rules(iterations: Sequence[Iteration], kl_limit: float) -> Iterator[Check]:
    health, findings = replay(iterations, kl_limit)
    for rule, limit in LIMITS.items():
        began = [f.iteration for f in findings if f.rule == rule.value and f.event == "began"]
        reading = health.readings.get(rule)
        outcome = "not found" if reading is None else f"not found; at the end: {reading.text}"
        level = "good"
        if began:
            outcome, level = f"found in iteration {', '.join(map(str, began))}", "watch"
        elif reading is None:
            outcome, level = TOO_FEW, "plain"
        yield _check(rule.value, limit.format(kl_limit=kl_limit), outcome, level)


def _time(iterations: Sequence[Iteration]) -> Check:
    limit = f"median of {WINDOW} iterations over {SLOW:g} times that of all before them"
    count = sum(1 for number, _ in curve_of(iterations, TIME) if number > 0)
    if count < 2 * WINDOW:
        return _check("iteration time", limit, TOO_FEW, "plain")
    found = "; ".join(each.text for each in find_slow_stretches(iterations))
    return _check("iteration time", limit, found or "not found", "watch" if found else "good")


def _numbers(iterations: Sequence[Iteration]) -> Check:
    names = {n for each in iterations for n, v in each.metrics.items() if v is None}
    found = f"found in {', '.join(sorted(names))}"
    return _check(
        "finite numbers", "a metric is NaN or infinite", found if names else "not found",
        "watch" if names else "good",
    )  # fmt: skip


def _measure_distance(metric: Metric, value: float) -> float:
    low, high = metric.healthy or (None, None)
    return max(low - value if low is not None else 0.0, value - high if high is not None else 0.0)


def _mean_values(iterations: Sequence[Iteration]) -> dict[str, float]:
    names = {name for each in iterations for name in each.metrics}
    values = {n: [v for i in iterations if (v := i.metrics.get(n)) is not None] for n in names}
    return {name: sum(found) / len(found) for name, found in values.items() if found}


def _check(name: str, limit: str, outcome: str, level: str) -> Check:
    return {"name": name, "limit": limit, "outcome": outcome, "level": level}
