"""Choose moments to kill a run at, and watch its folder from outside to recognise them.

A moment lies in the start of a run, in an iteration or in a save.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from mindspeed_rlxf.checkpoint.directory import RunDirectory

POLL_S = 0.002
INTO_SAVE_S = 0.05


class Phase(StrEnum):
    START = "start"
    ITERATION = "iteration"
    SAVE = "save"


class Watch:
    """Count the iterations that a run writes to its folder, from a kill or the first start on."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.began = time.monotonic()
        self.counts = [self._count()]  # lines of metrics at each change, and at each new start
        self.times = [self.began]  # when each of `counts` was read
        self._fewest = self.counts[0]  # since the last start
        self._failures = self._failures_size()

    def _count(self) -> int:
        try:
            return self.directory.metrics.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def _failures_size(self) -> int:
        """Return the size of failures.jsonl, to which a supervisor adds each failed attempt."""
        try:
            return (self.directory.logs / "failures.jsonl").stat().st_size
        except FileNotFoundError:
            return 0

    def iterations(self) -> int:
        """Count the whole lines of metrics now, and remember the count where it has changed.

        A resumed run removes the lines after its checkpoint.
        """
        count, failures = self._count(), self._failures_size()
        if count != self.counts[-1] or failures != self._failures:
            self._note(count)
        self._failures = failures
        self._fewest = min(self._fewest, count)
        return count

    def note_restart(self) -> None:
        self._note(self._count())
        self._fewest = self.counts[-1]

    def _note(self, count: int) -> None:
        self.counts.append(count)
        self.times.append(time.monotonic())

    def lost_iterations(self) -> int:
        return max(max(self.counts[: n + 1]) - count for n, count in enumerate(self.counts))

    def recovery_s(self) -> float | None:
        """Return the seconds from the kill to the first new iteration after the last restart.

        None = there is no new iteration yet.
        """
        pairs = list(pairwise(self.counts))
        resumed = max((n + 1 for n, (a, b) in enumerate(pairs) if b <= a), default=0)
        grown = [n + 1 for n, (a, b) in enumerate(pairs) if b > a and n + 1 > resumed]
        return self.times[grown[0]] - self.began if grown else None

    def new_iterations(self) -> int:
        """Return the number of iterations since the last start."""
        return self.iterations() - self._fewest

    def is_saving(self) -> bool:
        """Whether the folder has a checkpoint that is being written."""
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
    """A delay after a run has first done so many iterations and, for SAVE, has begun a save."""

    wanted: Phase
    delay_s: float
    new_iterations: int  # iterations that the started run has to do first

    @classmethod
    def choose(
        cls, rng: random.Random, start_s: float, iteration_s: float, most_iterations: int
    ) -> Moment:
        """Draw a phase, a delay within it, and the number of iterations before it."""
        wanted = rng.choice(list(Phase))
        longest = {
            Phase.START: start_s, Phase.ITERATION: iteration_s, Phase.SAVE: INTO_SAVE_S,
        }[wanted]  # fmt: skip
        seen_first = 0 if wanted is Phase.START else rng.randint(1, most_iterations)
        return cls(wanted, rng.uniform(0, longest), seen_first)

    def wait(self, watch: Watch, is_running: Callable[[], bool], limit_s: float) -> bool:
        """Wait for this moment; return whether the run is still running then."""
        deadline = time.monotonic() + limit_s
        while not self._has_begun(watch):
            if not is_running():
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"{watch.directory.path}: no progress within {limit_s:g} s")
            time.sleep(POLL_S)
        time.sleep(self.delay_s)
        return is_running()

    def _has_begun(self, watch: Watch) -> bool:
        if watch.new_iterations() < self.new_iterations:
            return False
        return self.wanted is not Phase.SAVE or watch.is_saving()
