"""What the console shows of a run, by its mode, without a terminal and on one."""

import io
import re
from collections.abc import Sequence

import pytest

from mindspeed_rlxf.reporting.console import (
    Console,
    current,
    format_short,
    make_console,
    open_console,
)
from mindspeed_rlxf.reporting.phases import phase

NAMES = ("actor/pg_loss_abs", "critic/kl", "timing/all")


class Clock:
    """Advances only when told."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def started(total: int, names: Sequence[str], stream: io.StringIO | None = None) -> Console:
    """A console of lines at the begin of a run."""
    console = Console(stream, Clock())
    console.begin(total, names)
    return console


def test_an_iteration_is_the_line_of_mindspeed_llm():
    """Two of ten iterations took 30 s: eight more take 120 s."""
    stream, clock = io.StringIO(), Clock()
    progress = Console(stream, clock)
    progress.begin(10, NAMES)
    clock.now_s += 30
    progress.update(2, {"critic/kl": 0.01234, "timing/all": 15, "other": 1, NAMES[0]: 0.5})
    progress.close()
    assert re.fullmatch(
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration: 2 / 10 \| actor/pg_loss_abs : 0\.5000 "
        r"\| critic/kl : 0\.0123 \| timing/all : 15\.0000 \| eta : 0:02:00\n",
        stream.getvalue(),
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.0000"),
        (1e-6, "1.00e-06"),
        (-0.00025, "-2.50e-04"),
        (0.001, "0.0010"),
        (1234.5, "1234.5000"),
        (2.5e7, "2.50e+07"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_small_and_large_numbers_stay_readable(value, shown):
    stream = io.StringIO()
    started(1, ["x"], stream).update(1, {"x": value})
    assert f"| x : {shown} |" in stream.getvalue()


def test_a_stream_of_an_ascii_locale_becomes_utf8():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    started(1, NAMES, stream).note("größe")
    assert raw.getvalue().decode("utf-8").endswith("größe\n")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.85156, "0.852"), (99.96, "100"), (1234.5, "1,234"), (2e-5, "2.0e-05"),
     (-0.5, "-0.5"), (1e9, "1.0e+09"), (float("nan"), "nan")],
)  # fmt: skip
def test_short_numbers_have_at_most_eight_characters(value, shown):
    assert format_short(value) == shown and len(shown) <= 8


def test_a_warning_is_shown_once():
    stream = io.StringIO()
    console = Console(stream, Clock())
    for what in ("a", "a", "b", "a"):
        console.warn_once(what, f"about {what}")
    assert re.findall("about .", stream.getvalue()) == ["about a", "about b"]


def test_the_mode_chooses_what_is_shown(monkeypatch):
    from mindspeed_rlxf.reporting.live import LiveConsole

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def chosen(mode: str, stream: io.StringIO) -> type:
        console = make_console(mode, stream)
        console.close()
        return type(console)

    file, terminal = io.StringIO, Terminal
    assert [chosen("auto", each()) for each in (file, terminal)] == [Console, LiveConsole]
    assert chosen("line", terminal()) is Console
    monkeypatch.setenv("WORLD_SIZE", "2")  # other ranks of torchrun print there too
    assert chosen("auto", terminal()) is Console
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TERM", "dumb")
    assert chosen("auto", terminal()) is Console


def test_the_recorder_gets_the_console_that_the_command_opened():
    stream = io.StringIO()
    with open_console("line", stream) as console:
        assert current() is console
    assert type(current()) is Console and current() is not console


@pytest.mark.parametrize(("rank", "prints"), [("0", True), ("1", False)])
def test_phases_are_printed_by_the_first_rank_alone(monkeypatch, rank, prints):
    monkeypatch.setenv("RANK", rank)
    stream = io.StringIO()
    with open_console("line", stream), phase("outer"), phase("inner"):
        pass
    with phase("later"):
        pass
    assert ("outer ..." in stream.getvalue()) is prints and "inner" not in stream.getvalue()
    assert "later" not in stream.getvalue()
