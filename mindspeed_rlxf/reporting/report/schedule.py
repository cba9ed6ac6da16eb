"""Read the timelines of a run for the chart of one iteration's schedule."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_rlxf.files.plain import open_plain, parse_json
from mindspeed_rlxf.reporting.timeline import DRIVER

MAX_ITERATIONS = 60  # with a schedule in the report
MAX_SPANS = 40_000  # of all of them
MAX_LANES = 64
MAX_LINE = 2**16

Event = dict[str, Any]


def read_schedules(run: Path) -> dict[str, Any]:
    """Return the spans of the run's timeline in the form that the page reads.

    At most MAX_ITERATIONS iterations, the first MAX_SPANS spans of all iterations and MAX_LANES
    lanes; other spans are left out, so the list of an iteration may be empty.

    lanes:      texts, `pool, role rank`, or DRIVER
    names:      names of spans
    seen:       number of iterations in the timeline
    iterations: iteration as text -> [[lane, name, 1 for a wait else 0, start, length], ...]
    Lane and name are indices; times are ms, the start from that of the iteration's first span.
    """
    by_iteration, labels = _read_events(run / "timeline")
    lanes, names = _Numbers(), _Numbers()
    chosen = _choose_iterations(by_iteration)
    found: dict[str, list[list[Any]]] = {}
    left = MAX_SPANS
    for iteration in chosen:
        events = sorted(by_iteration[iteration], key=lambda e: (e["ts"], -e["dur"]))[:left]
        left -= len(events)
        start = events[0]["ts"] if events else 0
        spans = []
        for event in events:
            lane = lanes.of(labels.get((event["pid"], event["tid"]), "?"))
            name, waits = names.of(str(event["name"])), int(event.get("cat") == "wait")
            began, length = round((event["ts"] - start) / 1e3, 2), round(event["dur"] / 1e3, 2)
            if lane < MAX_LANES:
                spans.append([lane, name, waits, began, length])
        found[str(iteration)] = spans
    return {"lanes": lanes.texts[:MAX_LANES], "names": names.texts, "iterations": found,
            "seen": len(by_iteration)}  # fmt: skip


class _Numbers:
    """Numbers texts in the order of their first use."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._known: dict[str, int] = {}

    def of(self, text: str) -> int:
        """Return the number of a text, from 0 on; add the text to `texts` if it is new."""
        if text not in self._known:
            self._known[text] = len(self.texts)
            self.texts.append(text)
        return self._known[text]


def _read_events(folder: Path) -> tuple[dict[int, list[Event]], dict[tuple[int, int], str]]:
    """Return iteration -> spans, and (pid, tid) -> label: DRIVER, or "pool, role rank".

    Reads all timeline files of the folder. Spans of negative duration are left out.
    """
    spans: dict[int, list[Event]] = defaultdict(list)
    pools: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for event in _iterate_events(folder):
        args = event["args"]
        if event["ph"] == "M" and event["name"] == "process_name":
            pools[event["pid"]] = str(args["name"])
        elif event["ph"] == "M":
            threads[event["pid"], event["tid"]] = str(args["name"])
        elif event["dur"] >= 0:
            spans[int(args["iteration"])].append(event)
    labels = {
        (pid, tid): DRIVER if pools.get(pid) == DRIVER else f"{pools.get(pid, '?')}, {text}"
        for (pid, tid), text in threads.items()
    }
    return spans, labels


def _iterate_events(folder: Path) -> Iterator[Event]:
    """Yield the spans and the names of pools and ranks in all files of the timeline, oldest first.

    Files and lines that cannot be read are skipped, as are lines that lack a field.
    """
    for file in sorted(folder.glob("iterations_*.json")):
        with contextlib.suppress(OSError), open_plain(file) as stream:
            while line := stream.readline(MAX_LINE):
                with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
                    event = parse_json(line.strip().rstrip(b","))
                    _check_fields(event)
                    yield event


def _check_fields(event: Any) -> None:
    """Raise an error unless `event` is a span or a name, and has the fields that are read.

    The error is a ValueError, KeyError, TypeError or OverflowError.
    """
    args = event["args"]
    hash((event["pid"], event["tid"], event["name"]))
    if event["ph"] == "M":
        str(args["name"])
    elif event["ph"] != "X" or not math.isfinite(event["ts"] + event["dur"]):
        raise ValueError("neither a span nor a name")
    else:
        int(args["iteration"])


def _choose_iterations(by_iteration: dict[int, list[Event]]) -> list[int]:
    """Return at most MAX_ITERATIONS iterations, sorted.

    They are evenly chosen; the first, the last and the one with the longest single span are added.
    """
    everything = sorted(by_iteration)
    if len(everything) <= MAX_ITERATIONS:
        return everything
    evenly = MAX_ITERATIONS - 3
    chosen = {everything[i * len(everything) // evenly] for i in range(evenly)}
    slowest = max(everything, key=lambda n: max(e["dur"] for e in by_iteration[n]))
    return sorted(chosen | {everything[0], everything[-1], slowest})
