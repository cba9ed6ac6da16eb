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
    found: dict[int, Iteration] = {}
    for record in read_jsonl(run / "metrics.jsonl"):
        number, values = record.get("iteration"), record.get("metrics")
        if not isinstance(number, int) or not isinstance(values, dict):
            continue
        before = found[number].metrics if number in found else {}
        found[number] = Iteration(number, before | values, record.get("time_s") or 0.0)
    return [found[number] for number in sorted(found)]


def curve_of(iterations: Sequence[Iteration], name: str) -> list[tuple[int, float]]:
    """Return (iteration, value) pairs for a metric, finite values only."""
    found = ((each.number, each.metrics.get(name)) for each in iterations)
    return [(number, value) for number, value in found if value is not None]


def make_curves(iterations: Sequence[Iteration]) -> dict[str, dict[str, list[Any]]]:
    """Return metric -> {"x": iterations, "y": values with six digits}; long curves are thinned."""
    columns: dict[str, list[Point]] = {}
    for each in iterations:
        for name, value in each.metrics.items():
            columns.setdefault(name, []).append((each.number, value))
    found: dict[str, dict[str, list[Any]]] = {}
    for name in sorted(columns):
        points = [(x, None if y is None else float(f"{y:.6g}")) for x, y in thin(columns[name])]
        found[name] = {"x": [x for x, _ in points], "y": [y for _, y in points]}
    return found


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return at most `limit` points: both ends, and each stretch's lowest and highest value."""
    if len(points) <= limit:
        return list(points)
    stretches = (limit - 2) // 2
    kept = {0, len(points) - 1}
    for i in range(stretches):
        part = range(i * len(points) // stretches, (i + 1) * len(points) // stretches)
        if finite := [(points[n][1], n) for n in part if points[n][1] is not None]:
            kept |= {min(finite)[1], max(finite)[1]}
    return [points[n] for n in sorted(kept)]


def read_configs(run: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return (file name, dotted key -> value) for each config.yaml version, oldest first."""
    later = [file for file in run.glob("config.*.yaml") if file.name.split(".")[1].isdecimal()]
    later.sort(key=lambda file: int(file.name.split(".")[1]))
    found = []
    for file in (run / "config.yaml", *later):
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            found.append((file.name, flatten(yaml.safe_load(file.read_text(encoding="utf-8")))))
    return found


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value for nested mappings; an empty inner mapping counts as a value."""
    if not isinstance(value, dict) or (prefix and not value):
        return {prefix: value} if prefix else {}
    parts = (flatten(v, f"{prefix}.{k}" if prefix else str(k)) for k, v in value.items())
    return {key: item for part in parts for key, item in part.items()}


def read_failures(run: Path) -> list[dict[str, Any]]:
    """Return the run's failures, oldest first; failure.json's has `last`: True."""
    found = list(read_jsonl(run / "logs" / "failures.jsonl"))
    with contextlib.suppress(OSError, ValueError):
        found.append({**json.loads((run / "failure.json").read_bytes()), "last": True})
    return found
