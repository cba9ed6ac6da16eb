"""Read the files of a run that may be growing or truncated by a kill; skip unreadable parts."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindspeed_rlxf.reporting.jsonl import read_jsonl

MAX_POINTS = 2000  # of a curve

Point = tuple[int, float | None]


@dataclass(frozen=True)
class Iteration:
    """One metrics.jsonl line; None = a non-finite value. time_s: seconds."""

    number: int
    metrics: dict[str, float | None]
    time_s: float


def read_iterations(run: Path) -> list[Iteration]:
    """Return the sorted iterations in metrics.jsonl; repeated lines are merged."""
    iterations: dict[int, Iteration] = {}
    for record in read_jsonl(run / "metrics.jsonl"):
        number = record.get("iteration")
        metrics = record.get("metrics")
        if not isinstance(number, int) or not isinstance(metrics, dict):
            continue
        if number in iterations:
            metrics = iterations[number].metrics | metrics
        iterations[number] = Iteration(number, metrics, record.get("time_s") or 0.0)
    return [iterations[number] for number in sorted(iterations)]


def curve_of(iterations: Sequence[Iteration], name: str) -> list[tuple[int, float]]:
    """Return (iteration, value) pairs for a metric, finite values only."""
    curve = []
    for iteration in iterations:
        value = iteration.metrics.get(name)
        if value is not None:
            curve.append((iteration.number, value))
    return curve


def make_curves(iterations: Sequence[Iteration]) -> dict[str, dict[str, list[Any]]]:
    """Return metric -> {"x": iterations, "y": values with six digits}; long curves are thinned."""
    points: dict[str, list[Point]] = {}
    for iteration in iterations:
        for name, value in iteration.metrics.items():
            points.setdefault(name, []).append((iteration.number, value))
    curves: dict[str, dict[str, list[Any]]] = {}
    for name in sorted(points):
        curve: dict[str, list[Any]] = {"x": [], "y": []}
        for number, value in thin(points[name]):
            curve["x"].append(number)
            curve["y"].append(None if value is None else float(f"{value:.6g}"))
        curves[name] = curve
    return curves


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return at most `limit` points: both ends, and each stretch's lowest and highest value."""
    if len(points) <= limit:
        return list(points)
    stretches = (limit - 2) // 2
    kept_indices = {0, len(points) - 1}
    for i in range(stretches):
        finite = []  # (value, index)
        for n in range(i * len(points) // stretches, (i + 1) * len(points) // stretches):
            value = points[n][1]
            if value is not None:
                finite.append((value, n))
        if finite:
            kept_indices |= {min(finite)[1], max(finite)[1]}
    return [points[n] for n in sorted(kept_indices)]


def read_configs(run: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return (file name, dotted key -> value) for each config.yaml version, oldest first."""
    later = [file for file in run.glob("config.*.yaml") if file.name.split(".")[1].isdecimal()]
    later.sort(key=lambda file: int(file.name.split(".")[1]))
    configs = []
    for file in (run / "config.yaml", *later):
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            tree = yaml.safe_load(file.read_text(encoding="utf-8"))
            configs.append((file.name, flatten(tree)))
    return configs


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value for nested mappings; an empty inner mapping counts as a value."""
    if not isinstance(value, dict) or (prefix and not value):
        return {prefix: value} if prefix else {}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= flatten(inner, f"{prefix}.{name}" if prefix else str(name))
    return flat


def read_failures(run: Path) -> list[dict[str, Any]]:
    """Return the run's failures, oldest first; failure.json's has `last`: True."""
    failures = list(read_jsonl(run / "logs" / "failures.jsonl"))
    with contextlib.suppress(OSError, ValueError):
        failures.append({**json.loads((run / "failure.json").read_bytes()), "last": True})
    return failures
