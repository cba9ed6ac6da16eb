"""One line per iteration without a terminal, a bar on one."""

from __future__ import annotations

import io
import re

import pytest

from mindspeed_rlxf.reporting.console import Progress

NAMES = ("actor/pg_loss_abs", "critic/kl", "timing/all")


class Clock:
    """Advances only when told."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_iteration_is_the_line_of_mindspeed_llm():
    """Two of ten iterations took 30 s: eight more take 120 s."""
    stream, clock = io.StringIO(), Clock()
    progress = Progress(10, NAMES, stream, clock)
    clock.now_s += 30
    progress.update(2, {"critic/kl": 0.01234, "timing/all": 15, "other": 1, NAMES[0]: 0.5})
    progress.close()
    assert re.fullmatch(
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration: 2 / 10 \| actor/pg_loss_abs : 0\.5000 "
        r"\| critic/kl : 0\.0123 \| timing/all : 15\.0000 \| eta : 0:02:00\n",
        stream.getvalue(),
    )


def test_metrics_that_an_iteration_lacks_are_left_out():
    stream = io.StringIO()
    Progress(1, NAMES, stream, Clock()).update(1, {"timing/all": 1.0})
    assert "] iteration: 1 / 1 | timing/all : 1.0000 | eta : 0:00:00\n" in stream.getvalue()


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
    Progress(1, ["x"], stream, Clock()).update(1, {"x": value})
    assert f"| x : {shown} |" in stream.getvalue()


def test_a_terminal_gets_a_bar_with_the_metrics():
    stream = Terminal()
    progress = Progress(4, NAMES, stream, Clock())
    progress.update(1, {"critic/kl": 0.5})
    progress.update(3, {"critic/kl": 0.25})
    progress.close()
    last = stream.getvalue().rsplit("\r", 1)[1]
    assert "3/4" in last
    assert "critic/kl=0.2500" in last
    assert "iteration:" not in stream.getvalue()


@pytest.mark.parametrize("stream_type", [io.StringIO, Terminal])
def test_a_note_is_a_line_of_its_own(stream_type):
    stream = stream_type()
    progress = Progress(4, NAMES, stream, Clock())
    progress.note("validation | val/accuracy : 0.5")
    progress.close()
    assert re.search(r"\[[-\d]+ [:\d]+\] validation \| val/accuracy : 0\.5\n", stream.getvalue())


def test_a_stream_of_an_ascii_locale_becomes_utf8():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Progress(1, NAMES, stream, Clock()).note("größe")
    assert raw.getvalue().decode("utf-8").endswith("größe\n")


def test_lines_appear_at_once():
    """A buffered stream, as standard output into a file is."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")
    Progress(1, NAMES, stream, Clock()).update(1, {})
    assert raw.getvalue().endswith(b"\n")
