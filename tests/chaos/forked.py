"""Kill and restart a run of one process at random moments, until KILLS kills are done.

    python -m tests.chaos.forked MODELS OUTPUT SEED KILLS

Each start is a fork of this process, which has imported everything, and so takes only a second. The
run is that of `tests/distributed/resume_run.py`: sampled responses, shuffled prompts and
mini-batches, adaptive KL. OUTPUT gets the run `whole`, which nothing disturbs, and the run
`killed`. Prints a line for each kill.
"""

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cluster.local import LocalRuntime
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.roles import actor, critic, reference, reward  # noqa: F401  # for the forks
from tests.chaos.moments import Moment, Watch
from tests.distributed.resume_run import start

LIMIT_S = 120.0
ITERATIONS = 8  # enough that the run does not end before three kills


class Forked:
    """Start or resume a run in a forked process."""

    def __init__(
        self, models: Path, out: Path, async_save: bool, first: Callable[[], None] = lambda: None
    ) -> None:
        """first: called in the new process before the run starts"""
        self.status: int | None = None  # None = still running; -n = ended by signal n
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

    def is_running(self) -> bool:
        """Whether the process runs; sets `status` once it has ended."""
        done, status = os.waitpid(self._pid, os.WNOHANG) if self.status is None else (0, 0)
        if done:
            self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        os.kill(self._pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Wait for the end, kill the process after LIMIT_S; return the status."""
        deadline = time.monotonic() + LIMIT_S
        while self.is_running():
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.01)
        assert self.status is not None
        return self.status


def run_undisturbed(models: Path, out: Path) -> tuple[float, float]:
    """Run without kills; return the seconds until the end of the first iteration, and the mean
    seconds of the others."""
    began, run = time.monotonic(), Forked(models, out, False)
    watch = Watch(RunDirectory(out))
    while run.is_running() and not watch.iterations():
        time.sleep(0.01)
    first = time.monotonic()
    assert run.wait() == 0, "the undisturbed run must succeed"
    return first - began, (time.monotonic() - first) / ITERATIONS


def main(models: Path, output: Path, seed: int, kills: int) -> None:
    rng = random.Random(seed)
    start_s, iteration_s = run_undisturbed(models, output / "whole")
    while True:
        moment = Moment.choose(rng, start_s, iteration_s, most_iterations=1)
        run = Forked(models, output / "killed", async_save=rng.random() < 0.5)
        watch = Watch(RunDirectory(output / "killed"))
        if not kills or not moment.wait(watch, run.is_running, LIMIT_S):
            break
        phase = watch.phase()
        run.kill()
        kills -= 1
        print(f"killed: {phase.value} after {watch.iterations()} iterations", flush=True)
    assert run.wait() == 0, f"the run ended with status {run.status}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
