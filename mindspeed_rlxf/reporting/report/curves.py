"""Make curves of metrics that are short enough for a page and keep every extreme."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_rlxf.reporting.metric_table import find_metric
from mindspeed_rlxf.reporting.report.records import Iteration

MAX_POINTS = 2000  # of a curve
DIGITS = 6

Point = tuple[int, float | None]


def curve_of(iterations: Sequence[Iteration], name: str) -> list[tuple[int, float]]:
    """Return (iteration, value) of a metric; iterations without a finite value are left out."""
    found = ((each.number, each.metrics.get(name)) for each in iterations)
    return [(number, value) for number, value in found if value is not None]


def make_curves(iterations: Sequence[Iteration]) -> dict[str, dict[str, list[Any]]]:
    """Return metric -> {"x": iterations, "y": values}; long curves are thinned."""
    columns: dict[str, list[Point]] = {}
    for each in iterations:
        for name, value in each.metrics.items():
            columns.setdefault(name, []).append((each.number, value))
    return {name: _columns(thin(points)) for name, points in sorted(columns.items())}


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return at most `limit` points: the ends, and lowest, highest and first None of stretches."""
    if len(points) <= limit:
        return list(points)
    stretches = max((limit - 2) // 3, 1)
    kept = {0, len(points) - 1}
    for i in range(stretches):
        part = range(i * len(points) // stretches, (i + 1) * len(points) // stretches)
        finite = [(points[n][1], n) for n in part if points[n][1] is not None]
        if finite:
            kept |= {min(finite)[1], max(finite)[1]}
        kept |= set([n for n in part if points[n][1] is None][:1])
    return [points[n] for n in sorted(kept)]


def describe_metrics(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return name -> {"unit", "meaning", "healthy", "remedy"}; unknown metrics are left out."""
    found = {}
    for name in names:
        if metric := find_metric(name):
            found[name] = {"unit": metric.unit, "meaning": metric.meaning,
                           "healthy": metric.healthy, "remedy": metric.remedy}  # fmt: skip
    return found


def _columns(points: Sequence[Point]) -> dict[str, list[Any]]:
    values = [None if y is None else float(f"{y:.{DIGITS}g}") for _, y in points]
    return {"x": [x for x, _ in points], "y": values}
