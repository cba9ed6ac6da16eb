"""Console output: one line per iteration, or a live view on a terminal.

The command opens one console (`opened`); the run writes to it.
"""

import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TextIO

from mindspeed_rlxf.config.problems import printable
from mindspeed_rlxf.reporting.phases import PHASES
from mindspeed_rlxf.reporting.run_log import LINES

WARNING = "warning:"


class Console:
    """Prints one line per iteration in MindSpeed-LLM's format, with the estimated time left.

    `[2026-01-31 12:00:00] iteration: 3 / 10 | critic/kl : 0.0123 | eta : 0:01:23`
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Switch the stream to UTF-8; None = stdout."""
        self._stream = sys.stdout if stream is None else stream
        use_utf8(self._stream)
        self._clock = clock
        self._total = 0  # iterations
        self._names: tuple[str, ...] = ()
        self._start_s = clock()
        self._num_done_before = 0  # iterations of earlier starts
        self._warned: set[str] = set()

    def begin(self, total: int, names: Sequence[str], done: int = 0, title: str = "") -> None:
        """Start a run; prints nothing.

        Args:
            total: iterations in the whole run.
            names: metrics to show, in this order; missing ones are skipped.
            done: iterations finished earlier.
            title: shown only by a live view.
        """
        self._total = total
        self._names = tuple(names)
        self._start_s = self._clock()
        self._num_done_before = done

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Print a finished iteration's chosen metrics and the time left."""
        self.note(self.describe(iteration, metrics))

    def describe(self, iteration: int, metrics: Mapping[str, float]) -> str:
        """Return the line of a finished iteration: its chosen metrics and the time left."""
        columns = [f"iteration: {iteration} / {self._total}"]
        for name in self._names:
            if name in metrics:
                columns.append(f"{name} : {format_number(metrics[name])}")
        columns.append(f"eta : {self.time_left(iteration)}")
        return " | ".join(columns)

    def note(self, text: str) -> None:
        """Print a line after a timestamp in brackets, and log it."""
        LINES.info(text)
        self._print(f"[{datetime.now():%Y-%m-%d %H:%M:%S}] {text}")

    def warn_once(self, subject: str, text: str) -> None:
        """Print a warning, unless there was one with this subject before."""
        if subject not in self._warned:
            self._warned.add(subject)
            self.note(f"{WARNING} {text}")

    def close(self) -> None:
        """Do nothing; a live view stops here."""

    def time_left(self, iteration: int) -> timedelta:
        """Estimate the time left, in whole seconds, from this process's mean iteration time.

        Before the first iteration ends, the time since `begin` counts as its duration.
        """
        num_done = iteration - self._num_done_before
        mean_s = (self._clock() - self._start_s) / max(num_done, 1)
        return timedelta(seconds=round(mean_s * (self._total - iteration)))

    def _print(self, line: str) -> None:
        print(printable(line), file=self._stream, flush=True)


_open: Console | None = None


def current() -> Console:
    """Return the open console, or a new line console on stdout."""
    return Console() if _open is None else _open


@contextmanager
def opened(console: Console) -> Iterator[Console]:
    """Let `current` return a console inside the block, and close it at the end.

    Without a live view the first rank prints phases, too.
    """
    global _open
    if type(console) is Console and os.environ.get("RANK", "0") == "0":  # of torchrun
        PHASES.write = console.note
    _open = console
    try:
        yield console
    finally:
        console.close()
        _open = None
        PHASES.write = None


def use_utf8(stream: TextIO) -> None:
    """Switch a stream to UTF-8 whatever the locale; in-memory streams are left alone.

    Characters UTF-8 cannot encode are escaped. A UTF-8 stream is not changed.
    """
    if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def format_number(value: float) -> str:
    """Format with four decimals; magnitudes below 1e-3 (except 0) and from 1e6 as 1.00e-06."""
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.2e}"
    return f"{value:.4f}"


def format_short(value: float) -> str:
    """Format in at most 8 characters: three significant digits, from 100 an integer with commas."""
    if abs(value) >= 1e6 or (value != 0 and abs(value) < 1e-3):
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
