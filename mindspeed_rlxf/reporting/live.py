"""Live terminal view of a run, redrawn in place with rich.

Other output from this process scrolls above the view.
"""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TextIO

from rich.console import Console as Terminal, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mindspeed_rlxf.config.problems import printable
from mindspeed_rlxf.reporting.console import WARNING, Console, format_short
from mindspeed_rlxf.reporting.metric_table import validation_score
from mindspeed_rlxf.reporting.phases import PHASES
from mindspeed_rlxf.reporting.run_log import LINES

MAX_WIDTH = 120  # wider lines are hard to read
CURVE_WIDTH = 48
BLOCKS = "▁▂▃▄▅▆▇█"
CURVES = {"score": "critic/score/mean", "KL": "critic/kl"}
FACTS = {
    "length": {
        "mean": "response_length/mean", "median": "response_length/p50",
        "p90": "response_length/p90", "max": "response_length/max",
        "cut": "response_length/truncated_fraction",
    },
    "loss": {
        "policy": "actor/pg_loss_abs", "preference": "actor/dpo_loss", "critic": "critic/vf_loss",
        "gradient": "actor/grad_norm", "entropy": "actor/entropy",
        "explained": "critic/explained_variance",
    },
    "speed": {
        "tokens/s": "throughput/tokens_per_s", "MFU": "throughput/mfu",
        "per device": "throughput/tokens_per_s_per_device", "s/iteration": "timing/all",
    },
}  # fmt: skip
FAMILIES = {"seconds": "timing/", "GiB": "memory/", "idle": "idle/"}
LARGEST = 6  # values of a family


class LiveConsole(Console):
    """Draws the view until `close`; `note` and other output appear above it."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream, clock)
        self._title = ""
        self._iteration = 0
        self._num_warnings = 0
        self._metrics: dict[str, float] = {}
        self._time_left = ""
        self._validation = ""
        self._curves = {name: list[float]() for name in CURVES.values()}
        self._terminal = Terminal(file=stream, force_terminal=True, highlight=False)
        self._live = Live(self, console=self._terminal, refresh_per_second=2)
        self._live.start()
        self._terminal.show_cursor(True)  # a killed process cannot show it again

    def begin(self, total: int, names: Sequence[str], done: int = 0, title: str = "") -> None:
        """Start a run, see `Console.begin`."""
        super().begin(total, names, done, title)
        self._title = printable(title)
        self._iteration = done

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show a finished iteration's metrics, and log its line.

        The mean validation score stays until the next validation.
        """
        LINES.info(self.describe(iteration, metrics))
        self._iteration = iteration
        self._metrics = dict(metrics)
        self._time_left = f", {self.time_left(iteration)} left"
        for name, curve in self._curves.items():
            value = metrics.get(name, math.nan)
            if math.isfinite(value):
                curve.append(value)
        score = validation_score(metrics, "score")
        if score is not None:
            self._validation = f"validation {format_short(score)} (iteration {iteration})"

    def close(self) -> None:
        """Stop redrawing and restore stdout and stderr; may be called twice."""
        sys.stdout.flush()  # prints an unfinished line
        self._live.stop()

    def _print(self, line: str) -> None:
        is_warning = line.split("] ", 1)[-1].startswith(WARNING)
        self._num_warnings += is_warning
        text = Text(printable(line), style="yellow" if is_warning else "")
        self._terminal.print(text, soft_wrap=True)

    def __rich_console__(self, console: Terminal, options: ConsoleOptions) -> RenderResult:
        rows = Table.grid(padding=(0, 1))
        rows.add_column(style="dim", min_width=9, no_wrap=True)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        if self._total:
            passed = timedelta(seconds=int(self._clock() - self._start_s))
            progress = f"{self._iteration} / {self._total}  {self._iteration / self._total:.0%}"
            text = f"{progress}  {passed} passed{self._time_left}  {self._title}"
            rows.add_row("iteration", Text(text, "bold"))
        for label, name in CURVES.items():
            curve = self._curves[name]
            if curve:
                newest = (f"{format_short(curve[-1]):<8}", "bold")
                blocks = (draw_curve(curve, CURVE_WIDTH), "cyan")
                validation = self._validation if label == "score" else ""
                rows.add_row(label, Text.assemble(newest, blocks, "  ", validation))
        if self._metrics:
            for label, facts in FACTS.items():
                rows.add_row(label, self._format_facts(facts))
        for label, prefix in FAMILIES.items():
            rows.add_row(label, self._format_family(prefix))
        phase = printable(str(PHASES.current or "-"))
        warnings = f"  warnings above: {self._num_warnings}" if self._num_warnings else ""
        rows.add_row("now", phase + warnings)
        yield from console.render(rows, options.update_width(min(options.max_width, MAX_WIDTH) - 1))

    def _format_facts(self, facts: Mapping[str, str]) -> str:
        """Return the metrics among `facts`, label -> metric, on one line."""
        texts = []
        for label, name in facts.items():
            if name not in self._metrics:
                continue
            value = self._metrics[name]
            is_fraction = name.endswith(("_fraction", "/mfu"))
            text = f"{value:.0%}" if is_fraction else format_short(value)
            texts.append(f"{label} {text}")
        return "  ".join(texts)

    def _format_family(self, prefix: str) -> str:
        """Return the largest metrics whose names have the prefix on one line."""
        names = [name for name in self._metrics if name.startswith(prefix)]
        names.sort(key=lambda name: -self._metrics[name])
        return "  ".join(
            f"{name.removeprefix(prefix)} {format_short(self._metrics[name])}"
            for name in names[:LARGEST]
        )


def make_console(mode: str, stream: TextIO | None = None) -> Console:
    """Make a live view for a single rank on a terminal with cursor control, else a line console."""
    stream = stream or sys.stdout
    is_single = os.environ.get("WORLD_SIZE", "1") == "1"  # ranks of torchrun print there too
    can_move_cursor = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if mode == "line" or not can_move_cursor or not is_single:
        return Console(stream)
    return LiveConsole(stream)


def draw_curve(values: Sequence[float], width: int) -> str:
    """Draw values, oldest first, as block characters scaled to their range.

    Each character averages several values if there are more than `width`.
    """
    size = math.ceil(len(values) / width)
    means = [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((value - low) * scale + 0.5)] for value in means)
