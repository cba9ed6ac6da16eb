"""Show what the driver is waiting for: `with phase("loading the weights", total=4) as done: ...`.

The live view shows the outermost phase with its time. Without it, `phase` prints a line when it
begins, if `PHASES.write` is set.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Phase:
    """A phase in progress, with the number of its steps, None = unknown, and those finished."""

    what: str
    total: int | None = None
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    def advance(self, steps: int = 1) -> None:
        self.done += steps

    def __str__(self) -> str:
        steps = f", {self.done} of {self.total}" if self.total else ""
        return f"{self.what}{steps}, {time.monotonic() - self.started:.0f} s"


class Phases:
    """The current phases of this process, outermost first; `write` prints a line, if set."""

    def __init__(self) -> None:
        self.write: Callable[[str], None] | None = None
        self._stack: list[Phase] = []

    @property
    def current(self) -> Phase | None:
        """Return the outermost phase."""
        return self._stack[0] if self._stack else None

    @contextmanager
    def phase(self, what: str, total: int | None = None, prints: bool = True) -> Iterator[Phase]:
        """Yield the `Phase` of the block; phases on other threads than the main one are not shown.

        Args:
            prints: False = shown by the live view only.
        """
        each = Phase(what, total)
        if threading.current_thread() is not threading.main_thread():
            yield each
            return
        if prints and not self._stack and self.write is not None:
            self.write(f"{what} ...")
        self._stack.append(each)
        try:
            yield each
        finally:
            self._stack.remove(each)


PHASES = Phases()  # those of this process
phase = PHASES.phase
