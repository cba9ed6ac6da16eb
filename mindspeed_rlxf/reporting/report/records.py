"""Read the files of a run, which may be growing or cut by a kill; skip what is unreadable."""

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindspeed_rlxf.reporting.jsonl import read_jsonl
from mindspeed_rlxf.reporting.timeline import DRIVER

LOG_TAIL = 4 * 2**20  # bytes at the end of driver.log that are searched
RESUMED = "resumed from "
MAX_POINTS = 2000  # of a curve
MAX_ITERATIONS = 60  # with a schedule in the report
MAX_SPANS = 40_000  # of all of them
MAX_LANES = 64

Point = tuple[int, float | None]
Event = dict[str, Any]


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
        before = found[number].metrics if number in found else {}
        found[number] = Iteration(number, before | values, record.get("time_s") or 0.0)
    return [found[number] for number in sorted(found)]


def curve_of(iterations: Sequence[Iteration], name: str) -> list[tuple[int, float]]:
    """Return (iteration, value) of a metric; iterations without a finite value are left out."""
    found = ((each.number, each.metrics.get(name)) for each in iterations)
    return [(number, value) for number, value in found if value is not None]


def make_curves(iterations: Sequence[Iteration]) -> dict[str, dict[str, list[Any]]]:
    """Return metric -> {"x": iterations, "y": values of six digits}; long curves are thinned."""
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
    """Return at most `limit` points: the ends, and lowest, highest and first None of stretches."""
    if len(points) <= limit:
        return list(points)
    stretches = max((limit - 2) // 3, 1)
    kept = {0, len(points) - 1}
    for i in range(stretches):
        part = range(i * len(points) // stretches, (i + 1) * len(points) // stretches)
        if finite := [(points[n][1], n) for n in part if points[n][1] is not None]:
            kept |= {min(finite)[1], max(finite)[1]}
        kept |= set([n for n in part if points[n][1] is None][:1])
    return [points[n] for n in sorted(kept)]


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
            is_best = int(manifest["iteration"]) == best
            found.append({"name": path.name, "bytes": size, "best": is_best})
            about = {k: v for k, v in manifest.items() if k in ("versions", "layouts")}
    return found, flatten(about)


def read_schedules(run: Path) -> dict[str, Any]:
    """Return the spans of the run's timeline as the page reads them.

    iterations: iteration -> [[lane, name, 1 for a wait else 0, start, length], ...], with indices
    of lanes (`pool, role rank` or DRIVER) and names, and ms from the start of the first span
    """
    by_iteration, labels = _read_events(run / "timeline")
    numbers = sorted(by_iteration)
    if len(numbers) > MAX_ITERATIONS:
        evenly = MAX_ITERATIONS - 3
        slowest = max(numbers, key=lambda n: max(e["dur"] for e in by_iteration[n]))
        chosen = {numbers[i * len(numbers) // evenly] for i in range(evenly)}
        numbers = sorted(chosen | {numbers[0], numbers[-1], slowest})
    lanes: dict[str, int] = {}
    names: dict[str, int] = {}
    found: dict[str, list[list[Any]]] = {}
    left = MAX_SPANS
    for iteration in numbers:
        events = sorted(by_iteration[iteration], key=lambda e: (e["ts"], -e["dur"]))[:left]
        left -= len(events)
        spans = found[str(iteration)] = []
        for event in events:
            label = labels.get((event["pid"], event["tid"]), "?")
            lane = lanes.setdefault(label, len(lanes))
            name = names.setdefault(str(event["name"]), len(names))
            began, length = (event["ts"] - events[0]["ts"]) / 1e3, event["dur"] / 1e3
            if lane < MAX_LANES:
                waits = int(event.get("cat") == "wait")
                spans.append([lane, name, waits, round(began, 2), round(length, 2)])
    return {"lanes": list(lanes)[:MAX_LANES], "names": list(names), "iterations": found,
            "seen": len(by_iteration)}  # fmt: skip


def _read_events(folder: Path) -> tuple[dict[int, list[Event]], dict[tuple[int, int], str]]:
    """Return iteration -> spans, and (pid, tid) -> label; lines that cannot be read are skipped."""
    spans: dict[int, list[Event]] = defaultdict(list)
    pools: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for file in sorted(folder.glob("iterations_*.json")):
        for line in file.read_bytes().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
                event = json.loads(line.rstrip(b","))
                args, place = event["args"], (event["pid"], event["tid"])
                if event["ph"] == "M" and event["name"] == "process_name":
                    pools[event["pid"]] = str(args["name"])
                elif event["ph"] == "M":
                    threads[place] = str(args["name"])
                elif event["name"] and math.isfinite(event["ts"] + event["dur"]):
                    spans[int(args["iteration"])].append(event)
    labels = {
        (pid, tid): DRIVER if pools.get(pid) == DRIVER else f"{pools.get(pid, '?')}, {text}"
        for (pid, tid), text in threads.items()
    }
    return spans, labels
