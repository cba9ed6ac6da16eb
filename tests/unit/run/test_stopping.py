"""A stop lets the iteration end where that fits into the grace of the scheduler."""

from __future__ import annotations

import os
import signal
import time

import pytest

from mindspeed_rlxf.run.stopping import StopRequest


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def after(clock: Clock, stop: StopRequest, *seconds: float, first: int = 1) -> StopRequest:
    """The same after iterations that took so long."""
    for iteration, took in enumerate(seconds, first):
        stop.begin_iteration()
        clock.now += took
        stop.end_iteration(iteration)
    return stop


@pytest.fixture(autouse=True)
def timer(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the timers that were set."""
    seconds: list[float] = []
    monkeypatch.setattr(signal, "setitimer", lambda _which, s: seconds.append(s))
    return seconds


def test_an_iteration_and_its_save_that_fit_are_finished(
    clock: Clock, timer: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    stop = after(clock, StopRequest(60.0, clock=clock), 40.0, 50.0, 45.0)
    stop.record_save(3, 10.0)
    assert not stop.is_due()
    stop.begin_iteration()
    clock.now += 20.0
    stop.on_signal(signal.SIGTERM)  # 45 - 20 + 10 = 35
    assert capsys.readouterr().err == (
        "SIGTERM: stops after this iteration and its save, in about 35 s\n"
    )
    assert stop.is_due() and timer == [59.0]


def test_what_does_not_fit_stops_at_once_and_says_what_is_lost(clock: Clock) -> None:
    stop = after(clock, StopRequest(60.0, clock=clock), 100.0, 100.0, 100.0)
    stop.record_save(1, 5.0)
    stop.begin_iteration()
    clock.now += 40.0
    with pytest.raises(KeyboardInterrupt):
        stop.on_signal(signal.SIGINT)
    assert stop.reason == (
        "SIGINT; the iteration and its save need about 65 s, training.stop_grace_s=60"
    )
    assert stop.work_lost == (
        "iterations 2 to 4 will run again, from the checkpoint of iteration 1"
    )


def test_a_save_that_was_never_made_is_guessed_from_the_iterations(clock: Clock) -> None:
    stop = after(clock, StopRequest(60.0, clock=clock), 30.0)
    assert stop.left_s == 45.0
    assert StopRequest(60.0, clock=clock).left_s is None


def test_before_the_first_iteration_has_ended_a_signal_stops_at_once(clock: Clock) -> None:
    stop = StopRequest(60.0, clock=clock)
    with pytest.raises(KeyboardInterrupt):
        stop.on_signal(signal.SIGTERM)
    assert stop.work_lost == "nothing is lost"
    stop = StopRequest(60.0, clock=clock)
    stop.begin_iteration()
    with pytest.raises(KeyboardInterrupt):
        stop.on_signal(signal.SIGTERM)
    assert stop.work_lost == "iteration 1 will run again, from the start"


def test_a_second_signal_stops_at_once_but_not_an_echo_of_the_first(clock: Clock) -> None:
    stop = after(clock, StopRequest(60.0, clock=clock), 1.0)
    stop.on_signal(signal.SIGTERM)
    clock.now += 1.0
    stop.on_signal(signal.SIGINT)
    clock.now += 2.0
    with pytest.raises(KeyboardInterrupt):
        stop.on_signal(signal.SIGINT)
    assert stop.reason == "a second signal, SIGINT"


def test_a_prediction_that_was_wrong_ends_with_the_grace(clock: Clock) -> None:
    stop = after(clock, StopRequest(60.0, clock=clock), 1.0)
    stop.on_signal(signal.SIGTERM)
    clock.now += 59.0
    with pytest.raises(KeyboardInterrupt):
        stop.on_signal(signal.SIGALRM)
    assert stop.reason == "SIGTERM; training.stop_grace_s=60 has passed"


def test_wall_time_ends_the_run_while_a_save_still_fits(clock: Clock) -> None:
    stop = StopRequest(60.0, wall_s=100.0, started=990.0, clock=clock)
    after(clock, stop, 20.0, 30.0)  # now 1050; 1090 is the end
    stop.record_save(2, 5.0)
    assert not stop.is_due()  # 1050 + 30 + 5
    after(clock, stop, 6.0, first=3)
    assert stop.is_due() and "training.max_wall_time=100 s leaves no time" in stop.reason


def test_a_long_iteration_is_remembered_until_the_next_such_one(clock: Clock) -> None:
    """As one in fifty that is validated too."""
    for history, is_due in ((0, False), (51, True)):
        stop = StopRequest(60.0, 1000.0, clock(), clock, history)
        for iteration in range(1, 51):
            stop.begin_iteration()
            clock.now += 300 if iteration == 1 else 10
            stop.end_iteration(iteration)
            stop.record_save(iteration, 1.0)
        assert stop.is_due() is is_due


def test_ranks_agree_on_what_the_first_says(clock: Clock) -> None:
    stop = after(clock, StopRequest(60.0, clock=clock), 1.0)
    stop.agree = lambda mine: True
    assert stop.is_due()


def test_after_a_resume_nothing_before_it_counts_as_lost(clock: Clock) -> None:
    stop = StopRequest(60.0, clock=clock)
    stop.record_resume(7)
    assert stop.work_lost == "nothing is lost"
    stop.begin_iteration()
    assert stop.work_lost.startswith("iteration 8 will run again")


def test_signals_reach_it_while_it_watches_and_not_afterwards(clock: Clock) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with after(clock, StopRequest(60.0, clock=clock), 1.0) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
        assert stop.is_due()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
