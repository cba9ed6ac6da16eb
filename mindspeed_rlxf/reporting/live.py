"""Show a run as a view that is redrawn in place on a terminal, with rich.

Other output of this process appears as lines above the view.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from rich.console import Console as Terminal, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mindspeed_rlxf.config.problems import printable
from mindspeed_rlxf.reporting.console import WARNING, Console, format_short
from mindspeed_rlxf.reporting.phases import PHASES

MAX_WIDTH = 120  # wider lines are hard to read
CURVE_WIDTH = 48
CURVE_POINTS = 400
BLOCKS = "▁▂▃▄▅▆▇█"
COLOURS = ("cyan", "magenta", "green", "yellow", "blue")  # of the longest phases
CURVES = {
    "score": ("critic/score/mean", ()),
    "KL": ("critic/kl", (("coefficient", "critic/kl_coeff"), ("entropy", "actor/entropy"))),
}
FACTS = {
    "length": (
        ("mean", "response_length/mean"), ("median", "response_length/p50"),
        ("p90", "response_length/p90"), ("max", "response_length/max"),
        ("cut", "response_length/cut_fraction"),
    ),
    "loss": (
        ("policy", "actor/pg_loss_abs"), ("preference", "actor/dpo_loss"),
        ("critic", "critic/vf_loss"), ("gradient", "actor/grad_norm"),
        ("explained", "critic/explained_variance"),
    ),
    "speed": (
        ("tokens/s", "throughput/tokens_per_s"),
        ("per device", "throughput/tokens_per_s_per_device"), ("MFU", "throughput/mfu"),
        ("s/iteration", "timing/all"),
    ),
}  # fmt: skip


class LiveConsole(Console):
    """Draws the view, with `note` and all other output above it, until `close`."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream, clock)
        self.view = View(self)
        self._terminal = Terminal(file=stream, force_terminal=True, highlight=False)
        self._live = Live(self.view, console=self._terminal, refresh_per_second=2)
        self._live.start()
        self._terminal.show_cursor(True)  # a killed process cannot show it again

    def begin(self, total: int, names: Sequence[str], done: int = 0, title: str = "") -> None:
        """Begin a run, see `Console.begin`."""
        super().begin(total, names, done, title)
        self.view.title, self.view.total, self.view.iteration = printable(title), total, done

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished iteration in the view."""
        self.view.add(iteration, metrics)

    def close(self) -> None:
        """Stop redrawing, and give stdout and stderr back; later calls do nothing."""
        sys.stdout.flush()  # prints an unfinished line
        self._live.stop()

    def _print(self, line: str) -> None:
        is_warning = line.split("] ", 1)[-1].startswith(WARNING)
        self.view.warnings += is_warning
        text = Text(printable(line), style="yellow" if is_warning else "")
        self._terminal.print(text, soft_wrap=True)


class View:
    """The content of the view: the newest metrics, short curves, and the phase in progress."""

    def __init__(self, owner: Console) -> None:
        self._owner = owner
        self.title, self.total, self.iteration, self.warnings = "", 0, 0, 0
        self.metrics: dict[str, float] = {}
        self._left, self._validated = "", ""
        self._began = time.monotonic()
        self._curves = {name: deque[float](maxlen=CURVE_POINTS) for name, _ in CURVES.values()}

    def add(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a finished iteration.

        The mean of its validation scores, if it has any, stays in the view until the next ones.
        """
        self.iteration, self.metrics = iteration, dict(metrics)
        self._left = f"  {self._owner.time_left(iteration)} left"
        for name, curve in self._curves.items():
            if (value := metrics.get(name)) is not None and math.isfinite(value):
                curve.append(value)
        scores = [v for k, v in metrics.items() if k.startswith("val/") and k.endswith("/score")]
        if scores:
            mean = format_short(sum(scores) / len(scores))
            self._validated = f"validation {mean} (iteration {iteration})"

    def __rich_console__(self, console: Terminal, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, MAX_WIDTH) - 1
        lines = Table.grid(padding=(0, 1))
        lines.add_column(style="dim", width=8, no_wrap=True)
        lines.add_column(no_wrap=True, overflow="ellipsis")
        if self.metrics:
            for label, (name, facts) in CURVES.items():
                lines.add_row(label, self._draw_curve(name, self._validated, facts))
            for label, facts in FACTS.items():
                lines.add_row(label, self._facts(facts))
            lines.add_row("time", self._draw_phases(width - 9))
            lines.add_row("memory", self._describe_memory())
        lines.add_row("now", self._describe_phase())
        parts = [self._headline(), lines] if self.total else [lines]
        yield from console.render(Group(*parts), options.update_width(width))

    def _headline(self) -> Table:
        """Return title, iteration, a bar of the iterations done, the time passed and left."""
        passed = _format_clock(time.monotonic() - self._began)
        lines: list[tuple[str | ProgressBar, str]] = [
            (self.title, f"iteration {self.iteration} / {self.total}"),
            (
                ProgressBar(self.total, self.iteration, complete_style="cyan"),
                f"{self.iteration / self.total:4.0%}  {passed} passed{self._left}",
            ),
        ]
        table = Table.grid(expand=True)
        table.add_column()
        for left, right in lines:
            line = Table.grid(expand=True, padding=(0, 1))
            line.add_column(no_wrap=True, overflow="ellipsis", style="bold", ratio=1)
            line.add_column(no_wrap=True, width=len(right))
            line.add_row(left, right)
            table.add_row(line)
        return table

    def _draw_curve(self, name: str, more: str, facts: Sequence[tuple[str, str]]) -> Text:
        """Return the last value of a metric, its curve, and facts."""
        curve = self._curves[name]
        if not curve:
            return Text("-")
        value = (f"{format_short(curve[-1]):<8}", "bold")
        drawn = (draw_curve(list(curve), CURVE_WIDTH), "cyan")
        return Text.assemble(value, drawn, "  ", self._facts(facts) if facts else more)

    def _facts(self, named: Sequence[tuple[str, str]]) -> str:
        """Return `label number` for the (label, metric) pairs whose metric exists."""
        return "  ".join(
            f"{label} {_show(name, self.metrics[name])}"
            for label, name in named
            if name in self.metrics
        )

    def _draw_phases(self, width: int) -> Group:
        """Return a coloured bar of an iteration's longest phases, and its legend."""
        whole = self.metrics.get("timing/all") or math.inf
        outside = ("timing/all", "timing/save", "timing/val", "timing/sync")
        found = {
            name.removeprefix("timing/"): value / whole
            for name, value in self.metrics.items()
            if name.startswith("timing/") and name not in outside
        }
        bar, legend = Text(), Text()
        longest = sorted(found.items(), key=lambda item: -item[1])
        for (name, fraction), colour in zip(longest, COLOURS, strict=False):
            bar.append("█" * int(min(fraction, 1.0) * width), colour)
            legend.append("■ ", colour).append(f"{name} {fraction:.0%}  ")
        return Group(bar, legend)

    def _describe_memory(self) -> str:
        """Return the largest memory peak with its phase, and the idle fraction of each pool."""
        peaks = {k[7:]: v for k, v in self.metrics.items() if k.startswith("memory/")}
        phase = max(peaks, key=lambda name: peaks[name], default="")
        text = f"peak {peaks[phase]:.2f} GiB ({phase})" if phase else "-"
        idle = [f"{k[5:]} {v:.0%}" for k, v in self.metrics.items() if k.startswith("idle/")]
        return text + (f"  idle {', '.join(idle)}" if idle else "")

    def _describe_phase(self) -> str:
        """Return the phase in progress, else the number of the next iteration."""
        noun = "warning" if self.warnings == 1 else "warnings"
        warned = f"  {self.warnings} {noun} above" if self.warnings else ""
        if phase := PHASES.current:
            return printable(str(phase)) + warned
        runs = self.iteration < self.total
        return (f"iteration {self.iteration + 1}" if runs else "-") + warned


def draw_curve(values: Sequence[float], width: int) -> str:
    """Draw values, oldest first, as block characters scaled between the smallest and largest value.

    If there are more than `width` values, each character is the mean of several. Equal values get
    the lowest block. There must be one value at least.
    """
    size = math.ceil(len(values) / width)
    first = len(values) % size
    parts = [values[:first]] if first else []
    parts += [values[i : i + size] for i in range(first, len(values), size)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[0] * len(means)
    return "".join(BLOCKS[int((v - low) / (high - low) * (len(BLOCKS) - 1) + 0.5)] for v in means)


def _show(name: str, value: float) -> str:
    """Format a metric: fractions as a percentage, others by `format_short`."""
    return f"{value:.0%}" if name.endswith(("_fraction", "/mfu")) else format_short(value)


def _format_clock(seconds: float) -> str:
    """Format seconds, 0 or more, as H:MM:SS, rounded down."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
