"""Moments to kill a run at, seen from outside: in its start, in an iteration, in a save."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from mindspeed_rlxf.run.directory import RunDirectory

POLL_S = 0.002
INTO_SAVE_S = 0.05


class Phase(StrEnum):
    START = "start"
    ITERATION = "iteration"
    SAVE = "save"


class Watch:
    """A run's folder, which it writes meanwhile, from a kill (or its start) on."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.began = time.monotonic()
        self.counts = [self._count()]  # of iterations, whenever it changed or an attempt began
        self.times = [self.began]
        self._fewest = self.counts[0]
        self._failures = self._failures_told()

    def _count(self) -> int:
        try:
            return self.directory.metrics.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def _failures_told(self) -> int:
        """Bytes of what the attempts of a supervisor left, which the next one moves there."""
        try:
            return (self.directory.logs / "failures.jsonl").stat().st_size
        except FileNotFoundError:
            return 0

    def iterations(self) -> int:
        """Whole lines of metrics. A resumed run removes those after its checkpoint."""
        count, failures = self._count(), self._failures_told()
        if count != self.counts[-1] or failures != self._failures:
            self._note(count)
        self._failures = failures
        self._fewest = min(self._fewest, count)
        return count

    def started(self) -> None:
        """The run was started again, after it had ended."""
        self._note(self._count())
        self._fewest = self.counts[-1]

    def _note(self, count: int) -> None:
        self.counts.append(count)
        self.times.append(time.monotonic())

    def lost(self) -> int:
        """Iterations that were removed since."""
        return max(max(self.counts[: n + 1]) - count for n, count in enumerate(self.counts))

    def recovery_s(self) -> float | None:
        """Until the first new iteration after the last start; None = there was none yet."""
        pairs = list(pairwise(self.counts))
        resumed = max((n + 1 for n, (a, b) in enumerate(pairs) if b <= a), default=0)
        grown = [n + 1 for n, (a, b) in enumerate(pairs) if b > a and n + 1 > resumed]
        return self.times[grown[0]] - self.began if grown else None

    def new_iterations(self) -> int:
        """Those of this start."""
        return self.iterations() - self._fewest

    def is_saving(self) -> bool:
        try:
            hidden = list(self.directory.checkpoints.glob(".iter_*"))
        except FileNotFoundError:
            return False
        return any(path.suffix != ".removed" for path in hidden)

    def phase(self) -> Phase:
        if not self.new_iterations():
            return Phase.START
        return Phase.SAVE if self.is_saving() else Phase.ITERATION


@dataclass(frozen=True)
class Moment:
    """Some time after something was first seen of a run that has started."""

    wanted: Phase
    delay_s: float
    new_iterations: int  # that have to be seen first

    @classmethod
    def choose(
        cls, rng: random.Random, start_s: float, iteration_s: float, most_iterations: int
    ) -> Moment:
        """start_s, iteration_s: that a start takes until its first iteration, and each of them
        most_iterations: that may pass before
        """
        wanted = rng.choice(list(Phase))
        longest = {
            Phase.START: start_s, Phase.ITERATION: iteration_s, Phase.SAVE: INTO_SAVE_S,
        }[wanted]  # fmt: skip
        seen_first = 0 if wanted is Phase.START else rng.randint(1, most_iterations)
        return cls(wanted, rng.uniform(0, longest), seen_first)

    def wait(self, watch: Watch, goes_on: Callable[[], bool], limit_s: float) -> bool:
        """Whether the run is still there at this moment. Raises TimeoutError after limit_s."""
        deadline = time.monotonic() + limit_s
        while not self._came(watch):
            if not goes_on():
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"{watch.directory.path}: no progress within {limit_s:g} s")
            time.sleep(POLL_S)
        time.sleep(self.delay_s)
        return goes_on()

    def _came(self, watch: Watch) -> bool:
        if watch.new_iterations() < self.new_iterations:
            return False
        return self.wanted is not Phase.SAVE or watch.is_saving()
