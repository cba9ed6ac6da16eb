"""Messages on long phases: at growing intervals, for the outermost phase only."""

from __future__ import annotations

import threading
import time

import pytest

from mindspeed_rlxf.reporting import phases
from mindspeed_rlxf.reporting.phases import Phase, Phases


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> tuple[Phases, list[str]]:
    """Phases whose thread looks every 5 ms, and the lines that they write."""
    monkeypatch.setattr(phases, "TICK_S", 0.005)
    made, lines = Phases(), list[str]()
    made.write = lines.append
    return made, lines


def wait_for(lines: list[str], count: int) -> None:
    deadline = time.monotonic() + 5.0
    while len(lines) < count:
        assert time.monotonic() < deadline, lines
        time.sleep(0.005)


def test_a_long_phase_has_lines_and_an_end(quick: tuple[Phases, list[str]]) -> None:
    made, lines = quick
    with made.phase("loading", 4, first_s=0.02) as phase:
        phase.advance(3)
        wait_for(lines, 2)
    wait_for(lines, 3)
    assert lines[0] == "loading, 3 of 4, 0 s ..." == lines[1]
    assert lines[-1] == "loading: done after 0 s"


def test_a_short_phase_has_no_line(quick: tuple[Phases, list[str]]) -> None:
    made, lines = quick
    with made.phase("short", None, first_s=10.0):
        time.sleep(0.05)
    time.sleep(0.02)
    assert lines == []


def test_the_outermost_phase_is_shown(quick: tuple[Phases, list[str]]) -> None:
    made, _ = quick
    with made.phase("outer", None, first_s=0.0), made.phase("inner", None, first_s=0.0):
        assert made.current is not None and made.current.what == "outer"
    assert made.current is None


def test_a_phase_is_compared_with_the_time_of_the_last_one_of_its_name() -> None:
    made = Phases()
    with made.phase("gen", None, first_s=0.0) as first:
        assert first.share is None
    with made.phase("gen", None, first_s=0.0) as second:
        assert second.usual_s == pytest.approx(first.seconds, abs=0.05)


def test_shares_are_of_steps_or_of_the_usual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Phase, "seconds", 30.0)
    assert Phase("a", total=4, done=1).share == 0.25
    assert Phase("a", usual_s=60.0).share == 0.5 and str(Phase("a", usual_s=60.0)) == (
        "a, 30 of about 60 s"
    )
    assert Phase("a", usual_s=10.0).share == 0.99, "it is not done"
    assert str(Phase("a")) == "a, 30 s" and Phase("a").share is None


def test_phases_of_other_threads_are_not_shown() -> None:
    made, seen = Phases(), list[object]()

    def work() -> None:
        with made.phase("beside", None, first_s=0.0):
            seen.append(made.current)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]
