"""Show the progress of a run: a bar on a terminal, elsewhere one line per iteration."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TextIO

from tqdm import tqdm

from mindspeed_rlxf.files.printable import CODEC, RawStream, printable


class Progress:
    """Shows iterations as they end.

    Without a terminal, as MindSpeed-LLM did, with the time left behind:
    `[2026-01-31 12:00:00] iteration: 3 / 10 | critic/kl : 0.0123 | eta : 0:01:23`

    total: iterations of the run
    console_metrics: names to show, in this order; those an iteration does not have are left out
    clock: seconds, monotonic
    """

    def __init__(
        self,
        total: int,
        console_metrics: Sequence[str],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        use_utf8(self._stream)
        self._total = total
        self._names = tuple(console_metrics)
        self._clock = clock
        self._start_s = clock()
        self._bar = None
        if self._stream.isatty():
            raw = RawStream(self._stream)
            self._bar = tqdm(total=total, file=raw, unit="it", dynamic_ncols=True)

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of an iteration that has ended. iteration: from 1"""
        shown = {printable(name): _number(metrics[name]) for name in self._names if name in metrics}
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(iteration - self._bar.n)
            return
        parts = [f"iteration: {iteration} / {self._total}"]
        parts += [f"{name} : {value}" for name, value in shown.items()]
        parts.append(f"eta : {self._time_left(iteration)}")
        self.note(" | ".join(parts))

    def note(self, text: str) -> None:
        """Print a line with the time in front, above the bar if there is one."""
        line = printable(f"[{datetime.now():%Y-%m-%d %H:%M:%S}] {text}")
        if self._bar is not None:
            self._bar.write(line, file=RawStream(self._stream))
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _time_left(self, iteration: int) -> timedelta:
        """Estimate the time left, in whole seconds, from the mean of the iterations so far."""
        mean_s = (self._clock() - self._start_s) / max(iteration, 1)
        return timedelta(seconds=round(mean_s * (self._total - iteration)))


def use_utf8(stream: TextIO) -> None:
    """Make a stream write UTF-8 in every locale. In-memory streams need no change."""
    if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", CODEC):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _number(value: float) -> str:
    """Format with four decimals, very small and very large numbers as 1.00e-06."""
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.2e}"
    return f"{value:.4f}"
