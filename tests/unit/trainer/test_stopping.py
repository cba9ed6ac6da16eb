"""A signal lets the iteration end where that fits into the grace of the scheduler."""

import os
import signal
import time

import pytest

from mindspeed_rlxf.trainer.stopping import (
    Stopped,
    StoppedByRule,
    StopRequest,
    ignore_hangups,
)
from tests.unit.checkpoint.runs import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stop(clock: Clock) -> StopRequest:
    return StopRequest(60.0, clock=clock)


def run_iterations(clock: Clock, stop: StopRequest, *seconds: float) -> None:
    for took in seconds:
        stop.begin_iteration()
        clock.now += took
        stop.end_iteration(stop.iteration + 1)


@pytest.fixture(autouse=True)
def timer(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the timers that were set."""
    seconds: list[float] = []
    monkeypatch.setattr(signal, "setitimer", lambda _which, s: seconds.append(s))
    return seconds


def test_an_iteration_that_fits_into_the_grace_is_finished(clock, stop, timer, capsys):
    run_iterations(clock, stop, 40.0, 50.0, 45.0)
    stop.record_save(3, 10.0)
    assert not stop.is_due()
    stop.begin_iteration()
    clock.now += 20.0
    stop.on_signal(signal.SIGTERM)  # 45 - 20 + 10 = 35
    assert "SIGTERM: stops after this iteration and its save, in about 35 s" in (
        capsys.readouterr().err
    )
    assert stop.is_due() and timer == [59.0]


def test_a_stop_at_once_names_the_iterations_that_are_lost(clock, stop):
    run_iterations(clock, stop, 100.0, 100.0, 100.0)
    stop.record_save(1, 5.0)
    stop.begin_iteration()
    clock.now += 40.0
    with pytest.raises(KeyboardInterrupt):
        stop.on_signal(signal.SIGINT)
    assert "need about 65 s, more than training.stop_grace_s=60" in stop.reason
    assert stop.work_lost == (
        "iterations 2 to 4 will run again, from the checkpoint of iteration 1"
    )


@pytest.mark.parametrize(
    ("began", "lost"),
    [(False, "nothing is lost"), (True, "iteration 1 will run again, from the start")],
)
def test_before_the_first_iteration_has_ended_a_signal_stops_at_once(stop, began, lost):
    if began:
        stop.begin_iteration()
    with pytest.raises(KeyboardInterrupt):
        stop.on_signal(signal.SIGTERM)
    assert stop.work_lost == lost


def test_a_second_signal_stops_at_once_unless_it_follows_within_seconds(clock, stop):
    run_iterations(clock, stop, 1.0)
    stop.on_signal(signal.SIGTERM)
    clock.now += 1.0
    stop.on_signal(signal.SIGINT)
    clock.now += 2.0
    with pytest.raises(KeyboardInterrupt):
        stop.on_signal(signal.SIGINT)
    assert stop.reason == "another signal, SIGINT"


def test_a_third_signal_stops_at_once(clock, stop):
    run_iterations(clock, stop, 1.0)
    stop.on_signal(signal.SIGINT)
    stop.on_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        stop.on_signal(signal.SIGINT)


def test_an_iteration_longer_than_predicted_ends_with_the_grace(clock, stop):
    run_iterations(clock, stop, 1.0)
    stop.on_signal(signal.SIGTERM)
    clock.now += 59.0
    with pytest.raises(KeyboardInterrupt):
        stop.on_signal(signal.SIGALRM)
    assert stop.reason == "SIGTERM; training.stop_grace_s=60 has passed"


def test_wall_time_ends_the_run_while_a_save_still_fits(clock):
    stop = StopRequest(60.0, wall_s=100.0, started=-10.0, clock=clock)
    run_iterations(clock, stop, 20.0, 30.0)  # now 50; 90 is the end
    stop.record_save(2, 5.0)
    assert not stop.is_due()  # 50 + 30 + 5
    run_iterations(clock, stop, 6.0)
    assert stop.is_due() and "training.max_wall_time=100 s leaves no time" in stop.reason


def test_a_long_iteration_counts_as_long_as_it_is_in_the_history(clock):
    """As a validation in every fiftieth iteration."""
    for history, is_due in ((0, False), (51, True)):
        stop = StopRequest(60.0, 1000.0, clock(), clock, history)
        for iteration in range(1, 51):
            run_iterations(clock, stop, 300 if iteration == 1 else 10)
            stop.record_save(iteration, 1.0)
        assert stop.is_due() is is_due


def test_all_ranks_take_the_answer_of_the_first(clock, stop):
    run_iterations(clock, stop, 1.0)
    stop.agree = lambda mine: (True, None)
    stop.request("lagging_rank", "seen by this rank alone")
    assert stop.is_due() and isinstance(stop.ended(), Stopped)
    stop.agree = lambda mine: (True, ("all_cut", "seen by the first rank"))
    assert stop.is_due() and isinstance(stop.ended(), StoppedByRule)


def test_signals_are_handled_inside_the_block_alone(clock, stop):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    run_iterations(clock, stop, 1.0)
    with stop:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
        assert stop.is_due()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.fixture
def hangups():
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_stops_the_run_once(clock, stop, hangups):
    run_iterations(clock, stop, 1.0)
    with stop:
        for _ in range(3):  # of the kernel, the shell and the supervisor
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.is_due()
    os.kill(os.getpid(), signal.SIGHUP)  # while the run directory is being unlocked


def test_nohup_keeps_a_run_going(clock, stop, hangups):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run_iterations(clock, stop, 1.0)
    with stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.is_due()


def test_output_to_a_closed_terminal_is_no_error(hangups):
    terminal, process_end = os.openpty()
    before = os.dup(2)
    os.dup2(process_end, 2)
    os.close(terminal)
    try:
        ignore_hangups()
        os.write(2, b"saved")
    finally:
        os.dup2(before, 2)


def test_a_rule_stops_after_the_iteration_and_says_which(clock, stop):
    run_iterations(clock, stop, 10.0)
    assert not stop.is_due() and isinstance(stop.ended(), Stopped)
    stop.request("all_cut", "95% of the responses are cut; raise it")
    assert stop.is_due()
    ended = stop.ended()
    assert stop.is_due() and isinstance(ended, StoppedByRule)
    assert (
        str(ended) == "stopped by logging.stop_on=all_cut: 95% of the responses are cut; raise it"
    )
