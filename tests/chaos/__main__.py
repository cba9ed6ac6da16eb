"""Kill random processes of real runs at random moments, restart the runs, compare their results.

    python -m tests.chaos [--kills 100] [--seed 1] [--variant NAME ...] [--output DIR]

Each variant is run once undisturbed. In further runs of the variant a random process (supervisor,
driver, worker, or one of Ray's) gets SIGKILL at a random moment of the start, an iteration or a
save. Where the supervisor does not restart the run, the same command is given again. Each finished
run must equal the undisturbed one bit by bit, and no process may be left. Prints the tables of
docs/results.md; exits with 1 at the first difference. The seed fixes kinds and delays of the
kills; which processes exist at that moment depends on the speed of the machine.
"""

import argparse
import contextlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from tests.chaos.moments import POLL_S, Moment, Phase, Watch
from tests.chaos.same_run import differences
from tests.chaos.tiny_run import command
from tests.processes import start_logged, with_sources

ITERATIONS = 24
KILLS_OF_A_RUN = 13
START_S, ITERATION_S = 20.0, 0.5
# Longest time without progress; until the last process has to end; between two looks at the tree.
LIMIT_S, GONE_S, LOOK_EVERY_S = 300.0, 60.0, 1.0
SEPARATE = ("placement.critic=critic", "resource_pool.main=1", "+resource_pool.critic=1")
ASYNC = ("training.async_save=true",)
AHEAD = (
    "placement.actor_rollout=actor",
    "+resource_pool.actor=2",
    "resource_pool.main=1",
    "actor_rollout.num_gpus_for_train=1",
    "actor_rollout.num_gpus_for_infer=1",
    "actor_rollout.num_samples_per_step=5",
    "rollout.max_staleness=3",
    "rollout.slice_steps=2",
)
VARIANTS = {
    "colocated": (),
    "colocated, asynchronous saves": ASYNC,
    "separate pools": SEPARATE,
    "separate pools, asynchronous saves": SEPARATE + ASYNC,
    "generation ahead": AHEAD,
    "generation ahead, asynchronous saves": AHEAD + ASYNC,
    "fsdp, asynchronous saves": ("training.backend=fsdp", *ASYNC),
}
KINDS = {  # word of a command line -> kind of the process; the first word that matches counts
    "RayWorker": "worker",
    "ray::": "Ray's idle worker",
    "gcs_server": "Ray's gcs_server",
    "raylet/raylet": "Ray's raylet",
    "ray_gpt.py": "driver",
}
OTHER = "another process of Ray"


@dataclass(frozen=True)
class Kill:
    """A kill and its cost. victim: kind of the killed process"""

    phase: Phase
    victim: str
    lost: int  # iterations that had to be repeated
    recovery_s: float | None  # from the kill to the next new iteration; None = killed again first


class Attempt:
    """Start the command once and keep track of all processes that descend from it."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._child = start_logged(arguments, log, with_sources())
        self._process = psutil.Process(self._child.pid)
        self._seen: set[psutil.Process] = {self._process}
        self._looked_at = time.monotonic()

    def processes(self) -> list[psutil.Process]:
        """Return the processes of this start that are alive, also those whose parent has died."""
        for parent in list(self._seen):
            try:
                self._seen.update(parent.children(recursive=True))
            except psutil.NoSuchProcess:
                continue
        return [process for process in self._seen if _is_alive(process)]

    def is_running(self) -> bool:
        """Whether the started command itself runs; about once a second look for new children."""
        if time.monotonic() - self._looked_at > LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self.processes()
        return self._child.poll() is None

    def kill_one(self, rng: random.Random) -> str:
        """Send SIGKILL to a random process of a random kind; return the kind."""
        by_kind: dict[str, list[psutil.Process]] = defaultdict(list)
        for process in self.processes():
            by_kind[self._kind(process)].append(process)
        kind = rng.choice(sorted(by_kind))
        victim = rng.choice(sorted(by_kind[kind], key=lambda process: process.pid))
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has just ended by itself
            victim.send_signal(signal.SIGKILL)
        return kind

    def _kind(self, process: psutil.Process) -> str:
        if process == self._process:
            return "supervisor"
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            return OTHER
        return next((kind for word, kind in KINDS.items() if word in line), OTHER)

    def kill_leftovers(self) -> list[str]:
        """Wait up to a minute for all processes to end, kill the rest and return their kinds."""
        psutil.wait_procs(self.processes(), timeout=GONE_S)
        left = self.processes()
        names = [self._kind(process) for process in left]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return names

    def exit_status(self) -> int:
        return self._child.wait(timeout=LIMIT_S)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class KilledRun:
    """Run the command until it has succeeded, with at most `kills` kills on the way."""

    def __init__(self, arguments: list[str], folder: Path, rng: random.Random, kills: int) -> None:
        self._arguments, self._folder = arguments, folder
        self._rng, self._left = rng, kills
        self._last: tuple[Phase, str] | None = None  # phase and victim of the last kill
        self._watch = Watch(RunDirectory(folder))
        self.kills: list[Kill] = []
        self.starts = 0

    def run(self) -> None:
        """Start the command until it exits with 0; it may not hang, nor leave processes."""
        status = None
        while status != 0:
            if self.starts and self._last is None:
                raise RuntimeError(f"the undisturbed run ended with {status}")
            self.starts += 1
            attempt = Attempt(self._arguments, self._folder.with_suffix(".log"))
            self._watch.note_restart()
            try:
                self._disturb(attempt)
                status = attempt.exit_status()
            finally:
                leftovers = attempt.kill_leftovers()
            print(f"  start {self.starts}: exit status {status}", flush=True)
            if leftovers:
                raise RuntimeError(f"processes left after the end: {', '.join(leftovers)}")
        self._record_last_kill()

    def _disturb(self, attempt: Attempt) -> None:
        while self._left:
            moment = Moment.choose(self._rng, START_S, ITERATION_S, most_iterations=3)
            if not moment.wait(self._watch, attempt.is_running, LIMIT_S):
                return
            phase, before = self._watch.phase(), self._watch.iterations()
            self._record_last_kill()
            self._last = phase, attempt.kill_one(self._rng)
            self._watch = Watch(RunDirectory(self._folder))
            self._left -= 1
            print(f"  killed {self._last[1]} in {phase.value}, iteration {before}", flush=True)
        while attempt.is_running():
            self._watch.iterations()
            if time.monotonic() - max(self._watch.times) > LIMIT_S:
                raise RuntimeError(f"{self._folder}: no progress within {LIMIT_S:g} s")
            time.sleep(POLL_S)

    def _record_last_kill(self) -> None:
        if self._last is not None:
            cost = self._watch.lost_iterations(), self._watch.recovery_s()
            self.kills.append(Kill(*self._last, *cost))


def run_variant(name: str, output: Path, kills: int, rng: random.Random) -> tuple[list[Kill], int]:
    """Run one variant undisturbed, then with kills; return the kills and the number of starts."""
    output.mkdir(parents=True, exist_ok=True)
    more = (f"training.train_iters={ITERATIONS}", "training.save_interval=2", *VARIANTS[name])
    print(name, flush=True)
    KilledRun(command(output / "whole", *more), output / "whole", rng, 0).run()
    found: list[Kill] = []
    starts = 0
    for number in range(1, kills + 1):
        if len(found) >= kills:
            break
        folder = output / f"killed{number}"
        count = min(KILLS_OF_A_RUN, kills - len(found))
        run = KilledRun(command(folder, *more), folder, rng, count)
        run.run()
        wrong = differences(RunDirectory(output / "whole"), RunDirectory(folder), ITERATIONS)
        if wrong:
            raise RuntimeError(f"{folder} differs from the undisturbed run in: {'; '.join(wrong)}")
        found += run.kills
        starts += run.starts
    return found, starts


def table(kills: dict[str, list[Kill]], key: str) -> str:
    """Return a Markdown table with a row for each value of `key` (`phase` or `victim`)."""
    groups: dict[str, list[Kill]] = defaultdict(list)
    for kill in (kill for found in kills.values() for kill in found):
        groups[str(getattr(kill, key))].append(kill)
    lines = [f"| {key} | kills | iterations lost: mean, most | recovery s: median, longest |"]
    lines.append("|---|---|---|---|")
    for name, found in sorted(groups.items()):
        lost = [kill.lost for kill in found]
        times = [kill.recovery_s for kill in found if kill.recovery_s is not None] or [float("nan")]
        lines.append(
            f"| {name} | {len(found)} | {statistics.mean(lost):.1f}, {max(lost)} "
            f"| {statistics.median(times):.0f}, {max(times):.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="default: all")
    parser.add_argument("--output", type=Path, help="folder of the runs; default: a temporary one")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a SIGTERM must end the run too
    names = arguments.variant or list(VARIANTS)
    output = arguments.output or Path(tempfile.mkdtemp(prefix="rlxf-chaos-"))
    kills: dict[str, list[Kill]] = {}
    began = time.monotonic()
    try:
        for number, name in enumerate(names):
            share = arguments.kills * (number + 1) // len(names) - sum(map(len, kills.values()))
            rng = random.Random(f"{arguments.seed} {name}")
            folder = output / name.replace(", ", "-").replace(" ", "-")
            kills[name], starts = run_variant(name, folder, share, rng)
            print(f"{name}: {len(kills[name])} kills, {starts} starts, same result", flush=True)
    except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
        print(f"failed: {error}; see {output}", file=sys.stderr)
        return 1
    finally:
        print(table(kills, "phase"), table(kills, "victim"), sep="\n\n")
        print(f"\n{(time.monotonic() - began) / 60:.0f} min, seed {arguments.seed}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
