"""Read the files of a run, which may be growing or cut by a kill; skip what is unreadable."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindspeed_rlxf.reporting.metrics import read_jsonl

LOG_TAIL = 4 * 2**20  # bytes at the end of driver.log that are searched
RESUMED = "resumed from "


@dataclass(frozen=True)
class Iteration:
    """One line of metrics.jsonl; None = a value that was not finite. time_s: seconds"""

    number: int
    metrics: dict[str, float | None]
    time_s: float


def read_iterations(run: Path) -> list[Iteration]:
    """Return the iterations of metrics.jsonl, sorted; several lines of one iteration are merged."""
    found: dict[int, Iteration] = {}
    for record in read_jsonl(run / "metrics.jsonl"):
        number, values = record.get("iteration"), record.get("metrics")
        if not isinstance(number, int) or not isinstance(values, dict):
            continue
        metrics = {name: _finite_number(value) for name, value in values.items()}
        before = found[number].metrics if number in found else {}
        time_s = _finite_number(record.get("time_s")) or 0.0
        found[number] = Iteration(number, before | metrics, time_s)
    return [found[number] for number in sorted(found)]


def read_configs(run: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return (file name, dotted key -> value) of config.yaml and later versions, oldest first."""
    later = [file for file in run.glob("config.*.yaml") if file.name.split(".")[1].isdecimal()]
    later.sort(key=lambda file: int(file.name.split(".")[1]))
    found = []
    for file in (run / "config.yaml", *later):
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            found.append((file.name, flatten(yaml.safe_load(file.read_text(encoding="utf-8")))))
    return found


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of nested mappings; an empty inner mapping counts as a value."""
    if not isinstance(value, dict) or (prefix and not value):
        return {prefix: value} if prefix else {}
    parts = (flatten(v, f"{prefix}.{k}" if prefix else str(k)) for k, v in value.items())
    return {key: item for part in parts for key, item in part.items()}


def read_failures(run: Path) -> list[dict[str, Any]]:
    """Return the failures of the run, oldest first; that of failure.json has `last`: True."""
    found = list(read_jsonl(run / "logs" / "failures.jsonl"))
    with contextlib.suppress(OSError, ValueError):
        found.append({**json.loads((run / "failure.json").read_bytes()), "last": True})
    names = ("time", "role", "rank", "host", "phase", "iteration", "message", "last")
    return [{name: each[name] for name in names if name in each} for each in found]


def read_resumes(run: Path) -> list[str]:
    """Return the last 100 lines of driver.log that contain RESUMED, oldest first."""
    with contextlib.suppress(OSError), open(run / "logs" / "driver.log", "rb") as stream:
        stream.seek(max(stream.seek(0, 2) - LOG_TAIL, 0))
        lines = stream.read().decode("utf-8", "replace").splitlines()
        return [line for line in lines if RESUMED in line][-100:]
    return []


def read_checkpoints(run: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the checkpoints by name, and "versions" and "layouts" of the last, flattened."""
    folder, found, about, best = run / "checkpoints", [], {}, -1
    with contextlib.suppress(OSError, ValueError):
        best = int((folder / "best_checkpointed_iteration.txt").read_text())
    for path in sorted(folder.glob("iter_*")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            manifest = json.loads((path / "manifest.json").read_bytes())
            size = sum(entry["size"] for entry in manifest["files"])
            number = int(manifest["iteration"])
            found.append({"name": path.name, "iteration": number, "bytes": size,
                          "best": number == best})  # fmt: skip
            about = {k: v for k, v in manifest.items() if k in ("versions", "layouts")}
    return found, flatten(about)


def _finite_number(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    with contextlib.suppress(OverflowError):  # an integer that is too large
        return float(value) if math.isfinite(value) else None
    return None
