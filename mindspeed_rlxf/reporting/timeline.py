"""Write per-rank spans for Perfetto (ui.perfetto.dev) or chrome://tracing.

    timeline/iterations_0000001.json      iterations 1 to 100, timeline/iterations_0000101.json, ...

The format is Google's Trace Event Format: a JSON array with times in microseconds since the epoch.
A device pool is a process, each role on each rank one of its threads. The category is the role, or
`wait`. Ranks use their host's clock, so events shift against each other if clocks differ.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ITERATIONS = 100  # of a file
KEPT = 5  # files
MOST_RANKS = 64  # of a pool that are drawn, the first ones
DRIVER = "driver"  # the pool of the driver's own work
HEAD, BETWEEN, TAIL = b"[\n", b",\n", b"\n]\n"


@dataclass(frozen=True)
class Span:
    """One interval during which a rank works or waits; times in seconds, `started` since the epoch.

    Attributes:
        name: `role.method` for work on a rank.
        pool: pool name, or `driver` for the driver's own work.
        kind: event category; "" = the role.
    """

    name: str
    pool: str
    rank: int
    started: float
    seconds: float
    kind: str = ""


class Timeline:
    """Appends spans to the timeline files, which are valid JSON after each write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pools: dict[str, int] = {}  # numbers, in the order of their first span
        self._roles: dict[str, int] = {}  # likewise
        self._file = folder  # the last one that was written to
        self._named = set[tuple[int, int]]()  # processes and threads that have a name in it

    def write(self, iteration: int, spans: Iterable[Span]) -> None:
        """Append one iteration's spans, from the first MOST_RANKS ranks in each pool, to its file.

        A new file replaces the oldest one if there are KEPT already.
        """
        first_iteration = (iteration - 1) // ITERATIONS * ITERATIONS + 1
        file = self._folder / f"iterations_{first_iteration:07d}.json"
        if file != self._file:
            self._file = file
            self._named = set()
            self._folder.mkdir(parents=True, exist_ok=True)
            older_files = [old for old in self._folder.glob("iterations_*.json") if old != file]
            for old in sorted(older_files)[: 1 - KEPT]:
                old.unlink()
        events: list[dict[str, Any]] = []
        for span in spans:
            events += self._make_events(iteration, span)
        lines = BETWEEN.join(json.dumps(event, ensure_ascii=False).encode() for event in events)
        file.touch()
        with open(file, "r+b") as stream:
            size = stream.seek(0, os.SEEK_END)
            # One write over the closing bracket: a kill leaves the old end or the new one.
            stream.seek(max(size - len(TAIL), 0))
            stream.write((BETWEEN if size else HEAD) + lines + TAIL)

    def _make_events(self, iteration: int, span: Span) -> list[dict[str, Any]]:
        """Return a span's event, after the names of its process and thread if the file lacks them.

        For example {"name": "critic.values", "ph": "X", "ts": 1769860800000000, "dur": 250000,
        "pid": 0, "tid": 65, ...}: rank 1 of the second role, for 0.25 s.
        """
        role = "" if span.pool == DRIVER else span.name.partition(".")[0]
        pid = self._pools.setdefault(span.pool, len(self._pools))
        tid = self._roles.setdefault(role, len(self._roles)) * MOST_RANKS + span.rank
        thread = {"pid": pid, "tid": tid}
        events: list[dict[str, Any]] = []
        if (pid, tid) not in self._named:
            self._named.add((pid, tid))
            thread_name = f"{role} rank {span.rank}".strip()
            names = {"process_name": span.pool, "thread_name": thread_name}
            for kind, name in names.items():
                events.append({"name": kind, "ph": "M", **thread, "args": {"name": name}})
        event = {
            "name": span.name, "cat": span.kind or span.name.partition(".")[0], "ph": "X",
            "ts": round(span.started * 1e6), "dur": round(span.seconds * 1e6), **thread,
            "args": {"iteration": iteration, "rank": span.rank},
        }  # fmt: skip
        events.append(event)
        return events
