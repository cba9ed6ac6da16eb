"""Kills runs of one process, each forked from this one, which has imported everything: a start
takes a second. FOLDER OUTPUT SEED KILLS; prints a line for each kill.

The run is that of `tests/distributed/resume_run.py`: sampled responses, shuffled prompts and
mini-batches, adaptive KL. OUTPUT gets `whole`, which nothing happens to, and `killed`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from mindspeed_rlxf.cluster.local import LocalRuntime
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.roles import actor, critic, reference, reward  # noqa: F401  # for the forks
from mindspeed_rlxf.run.directory import RunDirectory
from tests.chaos.moments import Moment, Watch
from tests.distributed.resume_run import start

LIMIT_S = 120.0
ITERATIONS = 12  # more than five kills let pass


class Forked:
    """A run, started or gone on with in a process of its own."""

    def __init__(
        self, models: Path, out: Path, async_save: bool, first: Callable[[], None] = lambda: None
    ) -> None:
        """first: done in the new process"""
        self.status: int | None = None  # negative: of a signal
        self._pid = os.fork()
        if self._pid == 0:
            self._run(models, out, async_save, first)

    def _run(self, models: Path, out: Path, async_save: bool, first: Callable[[], None]) -> None:
        status = 1
        try:
            first()
            runtime = LocalRuntime(DeviceKind.CPU, timeout_s=60.0)
            start(runtime, models, out, train_iters=ITERATIONS, async_save=async_save)
            runtime.shutdown()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def goes_on(self) -> bool:
        done, status = os.waitpid(self._pid, os.WNOHANG) if self.status is None else (0, 0)
        if done:
            self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        deadline = time.monotonic() + LIMIT_S
        while self.goes_on():
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.01)
        assert self.status is not None
        return self.status


def undisturbed(models: Path, out: Path) -> tuple[float, float]:
    """Seconds until its first iteration was done, and of each further one."""
    began, run = time.monotonic(), Forked(models, out, False)
    watch = Watch(RunDirectory(out))
    while run.goes_on() and not watch.iterations():
        time.sleep(0.01)
    first = time.monotonic()
    assert run.wait() == 0, "the run that nothing happens to"
    return first - began, (time.monotonic() - first) / ITERATIONS


def main(models: Path, output: Path, seed: int, kills: int) -> None:
    rng = random.Random(seed)
    start_s, iteration_s = undisturbed(models, output / "whole")
    while True:
        moment = Moment.choose(rng, start_s, iteration_s, most_iterations=1)
        run = Forked(models, output / "killed", async_save=rng.random() < 0.5)
        watch = Watch(RunDirectory(output / "killed"))
        if not kills or not moment.wait(watch, run.goes_on, LIMIT_S):
            break
        phase = watch.phase()
        run.kill()
        kills -= 1
        print(f"killed: {phase.value} after {watch.iterations()} iterations", flush=True)
    assert run.wait() == 0, f"the run ended with {run.status}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
