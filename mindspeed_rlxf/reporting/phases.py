"""Show what the driver is waiting for: `with phase("loading the weights", total=4) as done: ...`.

A phase that takes longer than its `first_s` is shown with its time and progress: in the live view,
or by lines at growing intervals. Of nested phases only the outermost is shown.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

FIRST_S = 2.0
WAIT_S = 30.0  # first_s of phases that every iteration has
LIVE_S = 1.0  # first_s of any phase in a live view
LONGEST_S = 60.0  # between two lines
TICK_S = 0.5


@dataclass
class Phase:
    """A phase in progress.

    total:   number of its steps; None = unknown
    done:    steps that are finished
    usual_s: seconds that the same phase took the last time; None = unknown
    """

    what: str
    total: int | None = None
    first_s: float = FIRST_S
    usual_s: float | None = None
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    def advance(self, steps: int = 1) -> None:
        self.done += steps

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def share(self) -> float | None:
        """Return the finished share, 0 to 1, by steps, else by the usual time; None = unknown.

        By time it stays at 0.99 at most.
        """
        if self.total:
            return min(self.done / self.total, 1.0)
        return min(self.seconds / self.usual_s, 0.99) if self.usual_s else None

    def __str__(self) -> str:
        steps = f", {self.done} of {self.total}" if self.total else ""
        is_timed = self.usual_s is not None and self.usual_s >= 1.0 and not self.total
        usual = f" of about {self.usual_s:.0f} s" if is_timed else " s"
        return f"{self.what}{steps}, {self.seconds:.0f}{usual}"


class Phases:
    """The current phases of this process, and the thread that prints lines about them."""

    def __init__(self) -> None:
        self.write: Callable[[str], None] | None = _print_line
        """Writes a line; None = nothing is written, as a live view reads `current` itself."""
        self._stack: list[Phase] = []
        self._usual: dict[str, float] = {}
        self._watch: threading.Thread | None = None

    @property
    def current(self) -> Phase | None:
        """Return the outermost phase if it has taken long enough to be shown, else None.

        Long enough is its `first_s`; where no lines are written, LIVE_S if that is less.
        """
        first = next(iter(self._stack), None)
        if first is None:
            return None
        least = first.first_s if self.write is not None else min(first.first_s, LIVE_S)
        return first if first.seconds >= least else None

    @contextmanager
    def phase(self, what: str, total: int | None, first_s: float) -> Iterator[Phase]:
        """Return a context manager for the block of a phase, which yields its `Phase`.

        total: number of steps, None = unknown; first_s: seconds after which the phase is shown
        Without `total`, its seconds become the usual time of later phases with the same `what`,
        also if the block raises. On threads other than the main thread it is neither shown nor
        remembered.
        """
        each = Phase(what, total, first_s, self._usual.get(what))
        if threading.current_thread() is not threading.main_thread():
            yield each
            return
        self._stack.append(each)
        if len(self._stack) == 1 and self.write is not None:
            self._start_watch()
        try:
            yield each
        finally:
            self._stack.remove(each)
            if not total:
                self._usual[what] = each.seconds

    def _start_watch(self) -> None:
        """Start the thread that writes lines about phases, unless it runs."""
        if self._watch is None or not self._watch.is_alive():
            self._watch = threading.Thread(target=self._watch_phases, daemon=True, name="phases")
            self._watch.start()

    def _watch_phases(self) -> None:
        """Write a line when the current phase is first shown, at growing intervals, and at its end.

        The intervals double up to LONGEST_S. Returns when `write` is None. Runs in the thread.
        """
        shown: Phase | None = None
        due = 0.0
        while self.write is not None:
            time.sleep(TICK_S)
            now = self.current
            if shown is not None and now is not shown:
                self._say(f"{shown.what}: done after {shown.seconds:.0f} s")
                shown = None
            if now is not None and (shown is None or now.seconds >= due):
                self._say(f"{now} ...")
                due = now.seconds + min(max(now.seconds, now.first_s), LONGEST_S)
                shown = now

    def _say(self, line: str) -> None:
        if self.write is not None:
            self.write(line)


def _print_line(line: str) -> None:
    print(line, file=sys.stdout, flush=True)  # stderr is for errors


PHASES = Phases()
"""Those of this process."""


def phase(what: str, total: int | None = None) -> AbstractContextManager[Phase]:
    """Return a context manager for a phase of a command, or of the start or end of a run.

    total: number of steps, None = unknown. The phase is shown after FIRST_S.
    """
    return PHASES.phase(what, total, FIRST_S)


def waiting(what: str) -> AbstractContextManager[Phase]:
    """Return a context manager for a phase that each iteration has; lines show it after WAIT_S."""
    return PHASES.phase(what, None, WAIT_S)
