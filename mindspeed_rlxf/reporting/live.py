"""Show a run as a view that is redrawn in place on a terminal, with rich.

Other output of this process appears as lines above the view. Control characters in it are shown as
text, not sent to the terminal (`files.printable`).
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO, cast

from rich.console import Console as Terminal
from rich.console import ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from mindspeed_rlxf.files.printable import RawStream, printable
from mindspeed_rlxf.reporting.console import WARNING, Console, format_short
from mindspeed_rlxf.reporting.phases import PHASES

REFRESHES_PER_S = 2
LABEL = 9  # width of the first column
MOST_WIDTH = 120  # of the view: wider lines are hard to read
CURVE_POINTS = 400
BLOCKS = "▁▂▃▄▅▆▇█"
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "white", "bright_black")
SHOWN_PHASES = 5


class LiveConsole(Console):
    """Draws the view, and prints `note` above it; replaces stdout and stderr until `close`."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream, clock)
        self.view = View(self)
        self._terminal = Terminal(
            file=cast(TextIO, RawStream(stream)), force_terminal=True, highlight=False
        )
        self._live = Live(
            self.view,
            console=self._terminal,
            refresh_per_second=REFRESHES_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._streams = sys.stdout, sys.stderr
        self._is_open = True
        self._write, PHASES.write = PHASES.write, None
        sys.stdout, sys.stderr = _Lines(self, sys.stdout), _Lines(self, sys.stderr)
        self._live.start()
        self._terminal.show_cursor(True)  # a killed process cannot show it again

    def begin(self, total: int, names: Sequence[str], done: int = 0, title: str = "") -> None:
        """Begin a run, see `Console.begin`; set title, total and iteration (`done`) of the view."""
        super().begin(total, names, done, title)
        self.view.title, self.view.total, self.view.iteration = printable(title), total, done

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished iteration in the view."""
        self.view.add(iteration, metrics)

    def note(self, text: str) -> None:
        """Print the text above the view; count it if it is a warning."""
        if text.startswith(WARNING):
            self.view.warnings += 1
        super().note(text)

    def close(self) -> None:
        """Print unfinished lines, stop redrawing, and restore stdout, stderr and `PHASES.write`.

        Later calls do nothing.
        """
        if not self._is_open:
            return
        self._is_open = False
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Lines):
                stream.end_line()
        sys.stdout, sys.stderr = self._streams
        PHASES.write = self._write
        self._live.stop()

    def _print(self, line: str) -> None:
        """Print a line above the view, or alone once the view is closed; warnings are yellow.

        In both cases control characters are replaced, and tabs expanded to 4 columns.
        """
        text = Text(printable(line).expandtabs(4))
        if line.split("] ", 1)[-1].startswith(WARNING):
            text.stylize("yellow")
        self._terminal.print(text, soft_wrap=True)

    print_line = _print


class View:
    """The content of the view: the newest metrics, short curves, and the phase in progress."""

    def __init__(self, owner: Console) -> None:
        self._owner = owner
        self.title, self.total, self.iteration, self.warnings = "", 0, 0, 0
        self.metrics: dict[str, float] = {}
        self._left = ""
        self._validated: tuple[int, float] | None = None
        self._began = time.monotonic()
        self._curves = {
            name: deque[float](maxlen=CURVE_POINTS) for name in ("critic/score/mean", "critic/kl")
        }

    def add(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a finished iteration, and estimate the time left.

        The mean of its validation scores, if it has any, stays in the view until the next ones.
        """
        self.iteration, self.metrics = iteration, dict(metrics)
        self._left = str(self._owner.time_left(iteration))
        for name, curve in self._curves.items():
            if (value := metrics.get(name)) is not None and math.isfinite(value):
                curve.append(value)
        scores = [v for k, v in metrics.items() if k.startswith("val/") and k.endswith("/score")]
        if scores:
            self._validated = iteration, sum(scores) / len(scores)

    def __rich_console__(self, _: Terminal, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, MOST_WIDTH) - 1
        for line in self.lines(width):
            line.truncate(width, overflow="ellipsis")
            line.no_wrap = True
            yield line

    def lines(self, width: int) -> list[Text]:
        """Return the lines of the view, for a terminal of `width` columns.

        First title and progress, only after `begin`; then, only after the first iteration, score,
        KL, length, loss, speed, phases and memory. The last line is always that of the phase.
        """
        lines = [self._format_headline(width), self._format_progress(width)] if self.total else []
        if self.metrics:
            lines += [
                self._format_curve("score", "critic/score/mean", self._validation(), width),
                self._format_curve("KL", "critic/kl", self._facts(
                    ("coefficient", "critic/kl_coeff"), ("entropy", "actor/entropy")), width),
                _line("length", self._facts(("mean", "response_length/mean"),
                      ("median", "response_length/p50"), ("p90", "response_length/p90"),
                      ("max", "response_length/max"), ("cut", "response_length/cut_fraction"))),
                _line("loss", self._facts(("policy", "actor/pg_loss_abs"),
                      ("preference", "actor/dpo_loss"), ("critic", "critic/vf_loss"),
                      ("gradient", "actor/grad_norm"),
                      ("explained", "critic/explained_variance"))),
                _line("speed", self._facts(("tokens/s", "throughput/tokens_per_s"),
                      ("per device", "throughput/tokens_per_s_per_device"),
                      ("MFU", "throughput/mfu"), ("s/iteration", "timing/all"))),
                *self._format_phases(width),
                _line("memory", self._format_memory()),
            ]  # fmt: skip
        return [*lines, self._phase_line(width)]

    def _format_headline(self, width: int) -> Text:
        """Return a line with the title and the iteration; a long title loses its start."""
        right = f"iteration {self.iteration} / {self.total}"
        room = max(width - len(right) - 2, 0)
        title = self.title[max(len(self.title) - room, 0) :]
        return Text.assemble((title, "bold"), " " * (width - len(title) - len(right)), right)

    def _format_progress(self, width: int) -> Text:
        """Return a bar of the iterations done, their percentage, and the time passed and left.

        The time passed is that since the view was made; that left is absent before the first `add`.
        """
        passed = time.monotonic() - self._began
        text = f" {self.iteration / self.total:4.0%}  {_format_clock(passed)} passed"
        text += f"  {self._left} left" if self._left else ""
        return Text.assemble(_draw_bar(self.iteration / self.total, width - len(text)), text)

    def _format_curve(self, label: str, name: str, facts: str, width: int) -> Text:
        """Return a line: label, last value of metric `name`, its curve, and `facts`.

        The curve has one character per value, or per several values where more would not fit
        `width`; at most 60, and room for 8 at least. Before the first value: the label and "-".
        """
        curve = self._curves[name]
        if not curve:
            return _line(label, "-")
        value = f"{format_short(curve[-1]):<8}"
        room = max(width - LABEL - len(value) - len(facts) - 4, 8)
        drawn = draw_curve(list(curve), min(room, 60))
        return Text.assemble(
            (f"{label:<{LABEL}}", "dim"), (value, "bold"), (drawn, "cyan"), "  ", (facts, "")
        )

    def _validation(self) -> str:
        if self._validated is None:
            return ""
        iteration, score = self._validated
        return f"validation {format_short(score)} (iteration {iteration})"

    def _facts(self, *named: tuple[str, str]) -> str:
        """Return `label number` for the (label, metric) pairs whose metric exists.

        They are two spaces apart; "" if no metric exists.
        """
        return "  ".join(
            f"{label} {_show(name, self.metrics[name])}"
            for label, name in named
            if name in self.metrics
        )

    def _format_phases(self, width: int) -> list[Text]:
        """Return two lines: a coloured bar of an iteration's longest phases, and its legend.

        Longest first, at most SHOWN_PHASES. The legend has the shares of the iteration; entries
        that do not fit `width` are left out. Validation, saving and the sending of weights are not
        shown; without times the lines have no phases.
        """
        whole = self.metrics.get("timing/all", 0.0)
        found = {
            name.partition("/")[2]: value / whole
            for name, value in self.metrics.items()
            if name.startswith("timing/") and name != "timing/all" and whole > 0
        }
        inside = {k: v for k, v in found.items() if k not in ("save", "val", "sync")}
        longest = sorted(inside.items(), key=lambda item: -item[1])[:SHOWN_PHASES]
        bar, legend = Text.assemble((f"{'time':<{LABEL}}", "dim")), Text(" " * LABEL)
        room = width - LABEL
        for (name, share), colour in zip(longest, COLOURS, strict=False):
            bar.append("█" * int(min(share, 1.0) * room), colour)
            entry = f"{name} {share:.0%}  "
            if len(legend) + len(entry) <= width:
                legend.append("■ ", colour).append(entry)
        return [bar, legend]

    def _format_memory(self) -> str:
        """Return the largest memory peak with its phase, and the idle share of each pool.

        "-" in place of the peak if no memory was measured; without idle shares only the peak.
        """
        peaks = {k[7:]: v for k, v in self.metrics.items() if k.startswith("memory/")}
        phase = max(peaks, key=lambda name: peaks[name], default="")
        text = f"peak {peaks[phase]:.2f} GiB ({phase})" if phase else "-"
        idle = [f"{k[5:]} {v:.0%}" for k, v in self.metrics.items() if k.startswith("idle/")]
        return text + (f"  idle {', '.join(idle)}" if idle else "")

    def _phase_line(self, width: int) -> Text:
        """Return the line `now`: the phase in progress, and the number of warnings if any.

        A phase whose progress is known has a bar. Between phases: the next iteration's number, or
        `-` after the last, or while their number is not known.
        width: columns of the line, to which the bar is fitted
        """
        phase = PHASES.current
        noun = "warning" if self.warnings == 1 else "warnings"
        warned = f"  {self.warnings} {noun} above" if self.warnings else ""
        if phase is None:
            runs = self.total > 0 and self.iteration < self.total
            return _line("now", (f"iteration {self.iteration + 1}" if runs else "-") + warned)
        text = f" {printable(str(phase))}{warned}"
        if phase.share is None:
            return _line("now", text.strip())
        bar = _draw_bar(phase.share, max(min(30, width - LABEL - len(text)), 0))
        return Text.assemble((f"{'now':<{LABEL}}", "dim"), bar, text)


class _Lines(io.TextIOBase):
    """Replaces stdout or stderr: collects text, and prints whole lines above the view."""

    encoding = "utf-8"

    def __init__(self, console: LiveConsole, stream: TextIO) -> None:
        self._console, self._stream, self._rest = console, stream, ""

    def write(self, text: str) -> int:
        """Print each line that the text completes; keep the rest for later; return len(text).

        Of a line with carriage returns, only what follows the last one is printed.
        """
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._console.print_line(line.rpartition("\r")[2])
        return len(text)

    def end_line(self) -> None:
        """Print the text that has no line end yet, as a whole line; nothing if there is none."""
        if self._rest:
            self.write("\n")

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def flush(self) -> None:
        """Do nothing: a line is printed when it is complete."""


def draw_curve(values: Sequence[float], width: int) -> str:
    """Draw values, oldest first, as block characters scaled between the smallest and largest value.

    If there are more than `width` values, each character is the mean of several. Equal values get
    the lowest block. There must be one value at least.
    """
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for part in _split_from_end(values, size)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[0] * len(means)
    return "".join(BLOCKS[int((v - low) / (high - low) * (len(BLOCKS) - 1) + 0.5)] for v in means)


def _split_from_end(values: Sequence[float], size: int) -> list[Sequence[float]]:
    """Split into parts of `size` that end with the last value; the first may be shorter."""
    first = len(values) % size
    parts = [values[:first]] if first else []
    return [*parts, *(values[i : i + size] for i in range(first, len(values), size))]


def _line(label: str, text: str) -> Text:
    return Text.assemble((f"{label:<{LABEL}}", "dim"), text)


def _draw_bar(share: float, width: int) -> Text:
    """Draw a bar of `width` characters, of which `share`, limited to 0 to 1, is filled."""
    filled = round(min(max(share, 0.0), 1.0) * max(width, 0))
    return Text.assemble(("━" * filled, "cyan"), ("━" * (max(width, 0) - filled), "bright_black"))


def _show(name: str, value: float) -> str:
    """Format a metric: shares as a percentage, others by `format_short`."""
    return f"{value:.0%}" if name.endswith(("_fraction", "/mfu")) else format_short(value)


def _format_clock(seconds: float) -> str:
    """Format seconds, 0 or more, as H:MM:SS, rounded down."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
