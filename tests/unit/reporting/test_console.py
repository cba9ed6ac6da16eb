"""What the console shows of a run, by its mode, without a terminal and on one."""

import io
import re
import threading

import pytest

from mindspeed_rlxf.reporting.console import Console, current, format_short, opened
from mindspeed_rlxf.reporting.live import LiveConsole, make_console
from mindspeed_rlxf.reporting.phases import Phases, phase

NAMES = ("actor/pg_loss_abs", "critic/kl", "timing/all")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
    ("value", "shown", "short"),
    [(0.0, "0.0000", "0"), (1e-6, "1.00e-06", "1.0e-06"), (-0.00025, "-2.50e-04", "-2.5e-04"),
     (0.85156, "0.8516", "0.852"), (99.96, "99.9600", "100"), (1234.5, "1234.5000", "1,234"),
     (2.5e7, "2.50e+07", "2.5e+07"), (float("nan"), "nan", "nan")],
)  # fmt: skip
def test_small_and_large_numbers_stay_readable(value, shown, short):
    console = Console(stream := io.StringIO())
    console.begin(1, ["x"])
    console.update(1, {"x": value})
    assert f"| x : {shown} |" in stream.getvalue()
    assert format_short(value) == short and len(short) <= 8


def test_a_stream_of_an_ascii_locale_becomes_utf8():
    stream = io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii")
    Console(stream).note("größe")
    assert raw.getvalue().decode("utf-8").endswith("größe\n")


def test_a_warning_is_shown_once():
    console = Console(stream := io.StringIO())
    for what in ("a", "a", "b", "a"):
        console.warn_once(what, f"about {what}")
    assert re.findall("about .", stream.getvalue()) == ["about a", "about b"]


@pytest.mark.parametrize(("mode", "stream", "ranks", "term", "kind"), [
    ("auto", io.StringIO, None, "xterm-256color", Console),
    ("auto", Terminal, None, "xterm-256color", LiveConsole),
    ("line", Terminal, None, "xterm-256color", Console),
    ("auto", Terminal, "2", "xterm-256color", Console),  # other ranks print there too
    ("auto", Terminal, "1", "dumb", Console),
])  # fmt: skip
def test_the_mode_chooses_what_is_shown(monkeypatch, mode, stream, ranks, term, kind):
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    console = make_console(mode, stream())
    console.close()
    assert type(console) is kind


def test_the_recorder_gets_the_console_that_the_command_opened():
    with opened(Console(io.StringIO())) as console:
        assert current() is console
    assert type(current()) is Console and current() is not console


@pytest.mark.parametrize(("rank", "prints"), [("0", True), ("1", False)])
def test_phases_are_printed_by_the_first_rank_alone(monkeypatch, rank, prints):
    monkeypatch.setenv("RANK", rank)
    stream = io.StringIO()
    with opened(Console(stream)), phase("outer"), phase("inner"):
        pass
    with phase("later"):
        pass
    assert ("outer ..." in stream.getvalue()) is prints and "inner" not in stream.getvalue()
    assert "later" not in stream.getvalue()


def test_phases_of_other_threads_are_not_shown():
    made, seen = Phases(), list[object]()

    def work() -> None:
        with made.phase("beside"):
            seen.append(made.current)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]
