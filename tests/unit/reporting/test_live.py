"""The live view: its lines, what is printed beside it, and that nothing controls the terminal."""

import io
import re
import sys
import time
from collections.abc import Iterator

import pytest

from mindspeed_rlxf.reporting.live import LiveConsole, draw_curve
from mindspeed_rlxf.reporting.phases import PHASES, Phase

SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
METRICS = {
    "critic/score/mean": 0.75, "critic/kl": 0.021, "critic/kl_coeff": 0.1, "actor/entropy": 0.4,
    "response_length/mean": 312.4, "response_length/max": 1024.0,
    "response_length/truncated_fraction": 0.125, "actor/pg_loss_abs": 0.01, "critic/vf_loss": 0.2,
    "throughput/tokens_per_s": 4210.0, "throughput/mfu": 0.31, "timing/gen": 4.0,
    "timing/update_actor": 5.0, "timing/all": 10.0, "timing/save": 3.0, "memory/gen": 31.5,
    "memory/update_actor": 43.25, "idle/main": 0.05, "val/a/score": 0.5, "val/b/score": 0.7,
}  # fmt: skip


class Terminal(io.TextIOWrapper):
    """A terminal that keeps what it gets."""

    def __init__(self) -> None:
        self.raw = io.BytesIO()
        super().__init__(self.raw, encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        return self.raw.getvalue().decode("utf-8")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    before = sys.stdout, sys.stderr
    yield Terminal()
    sys.stdout, sys.stderr = before


def shown(console: LiveConsole, width: int) -> list[str]:
    """The lines of the view as they are drawn."""
    from rich.console import Console

    drawn = io.StringIO()
    Console(file=drawn, width=width, height=40, force_terminal=False).print(console)
    return drawn.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(terminal, width):
    console = LiveConsole(terminal)
    console.begin(1000, [], title="outputs/a_run_with_a_rather_long_name" * 3)
    for i in range(1, 300):
        console.update(i, METRICS)
    lines = shown(console, width)
    console.close()
    assert len(lines) == 10 and max(map(len, lines)) <= width


def test_the_view_has_the_numbers_of_the_iteration(terminal):
    console = LiveConsole(terminal)
    console.begin(200, [], title="outputs/mine")
    console.update(50, METRICS)
    text = "\n".join(shown(console, 100))
    console.close()
    for part in (
        "outputs/mine", "50 / 200  25%", "score     0.75", "validation 0.6 (iteration 50)",
        "KL        0.021", "mean 312  max 1,024  cut 12%", "policy 0.01  critic 0.2  entropy 0.4",
        "tokens/s 4,210  MFU 31%", "all 10  update_actor 5  gen 4", "update_actor 43.2  gen 31.5",
        "main 0.05",
    ):  # fmt: skip
        assert part in text, part


def test_printed_lines_appear_above_the_view_with_control_characters_escaped(terminal):
    before = sys.stdout, sys.stderr
    console = LiveConsole(terminal)
    console.begin(3, [], title="\x1b]0;title\x07")
    print("from a library \x1b[2J\x1b]52;c;YQ==\x07 with [bold]marks[/bold]")
    print("a bar: 10%\ra bar: 100%", file=sys.stderr)
    sys.stdout.write("without an end")
    console.note("validation of \x9b31m")
    console.close()
    console.close()
    assert (sys.stdout, sys.stderr) == before and not terminal.closed
    text = terminal.text
    assert "with [bold]marks" in text and r"\u009b31m" in text and r"\u001b]0;" in text
    assert "a bar: 100%" in text and "10%\r" not in text and "without an end" in text
    rest = SEQUENCE.sub("", text)
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", rest)
    kinds = {found.group()[-1] for found in SEQUENCE.finditer(text)}
    assert kinds <= set("mKAhlG"), "colours, cursor up, erase line, cursor on and off"


def test_what_the_driver_waits_for_is_in_the_last_line(terminal, monkeypatch):
    console = LiveConsole(terminal)
    console.begin(3, [])
    phase = Phase("loading the weights", 4, 1, time.monotonic() - 12.2)
    monkeypatch.setattr(PHASES, "_stack", [phase])
    (last,) = shown(console, 80)[-1:]
    monkeypatch.undo()
    console.close()
    assert last.startswith("now") and last.endswith("loading the weights, 1 of 4, 12 s")


def test_a_curve_goes_from_its_smallest_to_its_largest_value():
    assert draw_curve([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert draw_curve([3.0, 3.0], 10) == "▁▁"
    assert draw_curve(list(range(100)), 4) == "▁▃▆█"  # means of 25
