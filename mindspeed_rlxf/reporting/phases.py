"""Show what the driver is waiting for: `with phase("loading the weights", total=4) as done: ...`.

The live view shows the outermost phase and its time. Without it, `phase` prints a line at the
start if `PHASES.write` is set.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Phase:
    """A phase in progress. total: number of steps, None = unknown."""

    what: str
    total: int | None = None
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    def advance(self, steps: int = 1) -> None:
        """Count finished steps."""
        self.done += steps

    def __str__(self) -> str:
        steps = f", {self.done} of {self.total}" if self.total else ""
        return f"{self.what}{steps}, {time.monotonic() - self.started:.0f} s"


class Phases:
    """This process's current phases, outermost first; `write` prints a line, if set."""

    def __init__(self) -> None:
        self.write: Callable[[str], None] | None = None
        self._stack: list[Phase] = []

    @property
    def current(self) -> Phase | None:
        """Return the outermost phase."""
        return self._stack[0] if self._stack else None

    @contextmanager
    def phase(self, what: str, total: int | None = None, prints: bool = True) -> Iterator[Phase]:
        """Yield the block's `Phase`; only the main thread's phases are shown.

        With `prints` False only the live view shows it.
        """
        phase = Phase(what, total)
        if threading.current_thread() is not threading.main_thread():
            yield phase
            return
        if prints and not self._stack and self.write is not None:
            self.write(f"{what} ...")
        self._stack.append(phase)
        try:
            yield phase
        finally:
            self._stack.remove(phase)


PHASES = Phases()  # those of this process
phase = PHASES.phase
