"""Read the timelines of a run for the chart of one iteration's schedule."""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from mindspeed_rlxf.reporting.timeline import DRIVER

MAX_ITERATIONS = 60  # with a schedule in the report
MAX_SPANS = 40_000  # of all of them
MAX_LANES = 64

Event = dict[str, Any]


def read_schedules(run: Path) -> dict[str, Any]:
    """Return the spans of the run's timeline in the form that the page reads.

    At most MAX_ITERATIONS iterations, the first MAX_SPANS spans and MAX_LANES lanes.

    lanes:      `pool, role rank`, or DRIVER
    names:      names of spans
    seen:       number of iterations in the timeline
    iterations: iteration as text -> [[lane, name, 1 for a wait else 0, start, length], ...]
    Lane and name are indices; times are ms, the start from that of the iteration's first span.
    """
    by_iteration, labels = _read_events(run / "timeline")
    lanes: dict[str, int] = {}
    names: dict[str, int] = {}
    found: dict[str, list[list[Any]]] = {}
    left = MAX_SPANS
    for iteration in _choose_iterations(by_iteration):
        events = sorted(by_iteration[iteration], key=lambda e: (e["ts"], -e["dur"]))[:left]
        left -= len(events)
        spans = found[str(iteration)] = []
        for event in events:
            label = labels.get((event["pid"], event["tid"]), "?")
            lane = lanes.setdefault(label, len(lanes))
            name = names.setdefault(str(event["name"]), len(names))
            began = round((event["ts"] - events[0]["ts"]) / 1e3, 2)
            length = round(event["dur"] / 1e3, 2)
            if lane < MAX_LANES:
                spans.append([lane, name, int(event.get("cat") == "wait"), began, length])
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


def _choose_iterations(by_iteration: dict[int, list[Event]]) -> list[int]:
    """Return at most MAX_ITERATIONS: evenly chosen, with the first, the last and the slowest."""
    everything = sorted(by_iteration)
    if len(everything) <= MAX_ITERATIONS:
        return everything
    evenly = MAX_ITERATIONS - 3
    chosen = {everything[i * len(everything) // evenly] for i in range(evenly)}
    slowest = max(everything, key=lambda n: max(e["dur"] for e in by_iteration[n]))
    return sorted(chosen | {everything[0], everything[-1], slowest})
