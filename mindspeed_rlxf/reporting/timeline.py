"""Write the work of each rank over time, for Perfetto (ui.perfetto.dev) or chrome://tracing.

    timeline/iterations_0000001.json      iterations 1 to 100, timeline/iterations_0000101.json, ...

The format is Google's Trace Event Format: an array of events, with times in microseconds since the
epoch. A pool of devices is shown as a process, each role on each rank as a thread of it. The
category is the role, or `wait`. Each rank uses the clock of its host: if clocks of hosts differ,
their events are shifted against each other.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ITERATIONS = 100  # of a file
KEPT = 5  # files
MOST_RANKS = 64  # of a pool that are drawn, the first ones
LONGER_THAN_AN_EVENT = 4096  # bytes
DRIVER = "driver"  # the pool of the driver's own work
HEAD, BETWEEN, TAIL = b"[\n", b",\n", b"\n]\n"


@dataclass(frozen=True)
class Span:
    """One interval of work, or of waiting, on a rank.

    Attributes:
        name: `role.method` of work on a rank.
        pool: name, or `driver` for the driver's own work.
        started: seconds since the epoch.
        kind: category in the file; "" = the role.
    """

    name: str
    pool: str
    rank: int
    started: float
    seconds: float
    kind: str = ""

    @property
    def role(self) -> str:
        """Return the name up to its first dot, or the whole name; "" for the driver's own work."""
        return "" if self.pool == DRIVER else self.name.partition(".")[0]


class Timeline:
    """Writes the files of a folder, which are valid JSON after each write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers: dict[str, int] = {}  # of pools, in the order of their first span
        self._roles: dict[str, int] = {}  # of roles, likewise
        self._file = folder  # the last one that was written to
        self._named = set[tuple[str, str, int]]()  # pools and ranks, by this process in the file

    def write(self, iteration: int, spans: Iterable[Span]) -> None:
        """Append an iteration's spans to the file of its 100 iterations.

        Before a new file, deletes the oldest, so that KEPT remain with it. Ranks from MOST_RANKS on
        are left out.
        """
        first = (iteration - 1) // ITERATIONS * ITERATIONS + 1
        file = self._folder / f"iterations_{first:07d}.json"
        if file != self._file:
            self._file, self._named = file, set()
        if not file.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            for old in sorted(self._folder.glob("iterations_*.json"))[: -(KEPT - 1)]:
                old.unlink()
        events = [
            event
            for span in spans
            if span.rank < MOST_RANKS
            for event in (*self._name_events(span), self._event(span, iteration))
        ]
        _append_events(file, events)

    def _event(self, span: Span, iteration: int) -> dict[str, Any]:
        return {
            "name": span.name,
            "cat": span.kind or span.name.partition(".")[0],
            "ph": "X",
            "ts": round(span.started * 1e6),
            "dur": round(span.seconds * 1e6),
            "pid": self._numbers[span.pool],
            "tid": self._lane(span),
            "args": {"iteration": iteration, "rank": span.rank},
        }

    def _name_events(self, span: Span) -> Iterable[dict[str, Any]]:
        """Yield the events that name the span's pool and rank, each only once per file."""
        pid = self._numbers.setdefault(span.pool, len(self._numbers))
        place = {"pid": pid, "tid": self._lane(span)}
        named = {
            "process_name": (span.pool, ("", -1)),
            "thread_name": (f"{span.role} rank {span.rank}".strip(), (span.role, span.rank)),
        }
        for kind, (text, lane) in named.items():
            if (key := (span.pool, *lane)) not in self._named:
                self._named.add(key)
                yield {"name": kind, "ph": "M", **place, "args": {"name": text}}

    def _lane(self, span: Span) -> int:
        """Return the thread number of the span's role on its rank; a role's ranks are adjacent."""
        return self._roles.setdefault(span.role, len(self._roles)) * MOST_RANKS + span.rank


def _append_events(file: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Append events to the JSON list in a file, which is created if absent and stays valid JSON.

    Bytes of an event that a kill left incomplete are overwritten. Does nothing without events.
    """
    new = BETWEEN.join(json.dumps(event, ensure_ascii=False).encode() for event in events)
    if not new:
        return
    file.touch()
    with open(file, "r+b") as stream:
        start = max(stream.seek(0, os.SEEK_END) - LONGER_THAN_AN_EVENT, 0)
        stream.seek(start)
        data = stream.read()
        # Without TAIL a write was cut off: after the last whole event, or else from the start.
        closed = data.endswith(TAIL)
        end = len(data) - len(TAIL) if closed else data.rfind(BETWEEN)
        kept = stream.seek(start + end if end >= 0 else 0)
        stream.truncate()
        stream.write((BETWEEN if kept else HEAD) + new + TAIL)
        stream.flush()
