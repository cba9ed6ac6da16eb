"""End a run before `train_iters`: on SIGTERM, SIGINT or SIGHUP, or before `max_wall_time`.

The trainer asks after each iteration: `if stop.is_due(): save, end`. If there is no time for
that, the signal handler raises KeyboardInterrupt and the run ends at once. An interrupted save
never damages a checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)
ONE_SIGNAL_S = 2.0  # a scheduler and a terminal may each signal the driver, meaning one stop
HISTORY = 15  # iterations, and saves, that the next one is predicted from


class Stopped(Exception):
    """The run ended before `train_iters` and is saved; the same command resumes it."""


class StoppedByRule(Exception):
    """The run was ended by `logging.stop_on` and is saved."""

    role = "driver"
    phase = "health"

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"stopped by logging.stop_on={rule}: {text}")
        self.rule = rule
        self.cause = str(self)


def ignore_hangups() -> None:
    """After a SIGHUP: ignore further ones, and write to nowhere if the terminal is gone.

    The shell and the kernel each send one, and a write to a closed terminal is an OSError.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def stop_signals() -> list[int]:
    """Return the signals that end a run; without SIGHUP if it is ignored, as under nohup."""
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return [*signals]


class StopRequest:
    """Decides whether a run ends after this iteration; as a context manager, handles signals.

    Times are in seconds. Before the first iteration ends there is no prediction, and a signal
    raises KeyboardInterrupt at once.
    """

    def __init__(
        self,
        grace_s: float,
        wall_s: float | None = None,
        started: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        history: int = HISTORY,
    ) -> None:
        """Prepare; signals are handled inside the context only.

        Args:
            grace_s: `training.stop_grace_s`.
            wall_s: `training.max_wall_time`; None = no limit.
            started: Command start by `clock`; None = now.
            clock: Seconds.
            history: Past iterations used for predictions, at least HISTORY.
        """
        self.grace_s = grace_s
        self.wall_s = wall_s
        self._clock = clock
        self._started = clock() if started is None else started
        self._iterations: deque[float] = deque(maxlen=max(history, HISTORY))
        self._saves: deque[float] = deque(maxlen=HISTORY)
        self._asked: float | None = None  # time of the first signal
        self._num_signals = 0
        self._since: float | None = None  # start of the iteration under way
        self._rule: tuple[str, str] | None = None  # name and text
        self._ends_by: tuple[str, str] | None = None  # the rule that all ranks end by
        self.reason = ""
        self.iteration = self.saved = 0  # the last that ended, and that was saved
        # Under torchrun, replaced by a function that returns the first rank's answer on all ranks.
        self.agree: Callable[[Any], Any] = lambda answer: answer

    def begin_iteration(self) -> None:
        """Start timing an iteration."""
        self._since = self._clock()

    def end_iteration(self, iteration: int) -> None:
        """Record the iteration's duration."""
        assert self._since is not None, "begin_iteration() comes first"
        self._iterations.append(self._clock() - self._since)
        self.iteration = iteration
        self._since = None

    def record_save(self, iteration: int, seconds: float) -> None:
        """Record the last saved iteration, and how long its save took."""
        self._saves.append(seconds)
        self.saved = iteration

    def request(self, rule: str, text: str) -> None:
        """Ask to save and end the run after this iteration, by a `logging.stop_on` rule."""
        self._rule = rule, text

    def is_due(self) -> bool:
        """Return whether to save and end now: by a signal, a rule or `max_wall_time`.

        Call it after each iteration on every rank: under torchrun all get rank 0's answer, and its
        rule for `ended` (none after a signal).
        """
        asked = self._asked is not None
        due = asked or self._rule is not None or self._no_time_for_another()
        agreed: tuple[bool, Any] = self.agree((due, None if asked else self._rule))
        due, self._ends_by = agreed
        return due

    def ended(self) -> Stopped | StoppedByRule:
        """Return the exception to raise after the save; Stopped after both a signal and a rule."""
        return Stopped() if self._ends_by is None else StoppedByRule(*self._ends_by)

    @property
    def under_way(self) -> int:
        """Iteration in progress, or the last one, whose save may continue; 0 before the first."""
        return self.iteration + (self._since is not None)

    @property
    def save_s(self) -> float:
        """Predicted save time: the longest recent save.

        Half the median iteration before the first save, 0 before the first iteration ends.
        """
        return max(self._saves or [self._usual_s() / 2])

    @property
    def left_s(self) -> float | None:
        """Predicted seconds until this iteration and its save end; None before one ended."""
        if not self._iterations:
            return None
        spent_s = 0.0 if self._since is None else self._clock() - self._since
        return max(self._usual_s() - spent_s, 0.0) + self.save_s

    def _usual_s(self) -> float:
        return statistics.median(self._iterations or [0.0])

    @property
    def work_lost(self) -> str:
        """Message on the iterations lost by stopping now."""
        first_lost = self.saved + 1
        last_lost = self.under_way
        if last_lost < first_lost:
            return "nothing is lost"
        if first_lost == last_lost:
            iterations = f"iteration {first_lost}"
        else:
            iterations = f"iterations {first_lost} to {last_lost}"
        start = f"the checkpoint of iteration {self.saved}" if self.saved else "the start"
        return f"{iterations} will run again, from {start}"

    def _no_time_for_another(self) -> bool:
        # Another iteration is expected to take as long as the longest past one.
        if self.wall_s is None or not self._iterations:
            return False
        needed_s = max(self._iterations) + self.save_s
        if self._clock() + needed_s <= self._started + self.wall_s:
            return False
        self.reason = (
            f"training.max_wall_time={self.wall_s:g} s leaves no time for another iteration and "
            f"its save, about {needed_s:.0f} s"
        )
        return True

    def on_signal(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal: end after this iteration if the grace time allows it, and print so.

        Otherwise, and before the first iteration ends, raise KeyboardInterrupt; also on a third
        signal, and on a second one that follows after ONE_SIGNAL_S. If the run continues, a timer
        sends SIGALRM one second before the grace time ends. Sets `reason`.
        """
        if number == signal.SIGHUP:
            ignore_hangups()
        name = signal.Signals(number).name
        now = self._clock()
        if number == signal.SIGALRM:
            self.reason = f"{self.reason}; training.stop_grace_s={self.grace_s:g} has passed"
            raise KeyboardInterrupt
        self._num_signals += 1
        if self._asked is not None:
            if self._num_signals == 2 and now - self._asked < ONE_SIGNAL_S:
                return
            self.reason = f"another signal, {name}"
            raise KeyboardInterrupt
        self._asked = now
        left_s = self.left_s
        self.reason = name
        if left_s is None:
            raise KeyboardInterrupt
        if left_s > self.grace_s:
            self.reason = (
                f"{name}; the iteration and its save need about {left_s:.0f} s, more than "
                f"training.stop_grace_s={self.grace_s:g}: raise it, or lower "
                f"training.save_interval, to lose less"
            )
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, max(self.grace_s - 1.0, 0.1))
        text = (
            f"{name}: stops after this iteration and its save, in about {left_s:.0f} s; another "
            f"signal after {ONE_SIGNAL_S:g} s, or a third one, stops at once"
        )
        print(text, file=sys.stderr, flush=True)
        logger.info(text)

    def __enter__(self) -> StopRequest:
        self._before: dict[int, Any] = {
            number: signal.signal(number, self.on_signal)
            for number in (*stop_signals(), signal.SIGALRM)
        }
        return self

    def __exit__(self, *_error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self.on_signal:  # SIGHUP may be ignored by now
                signal.signal(number, handler)
