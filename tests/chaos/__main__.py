"""Kill any process of real runs at random moments and start them again, until they are done.

    python -m tests.chaos [--kills 100] [--seed 1] [--variant NAME ...] [--output DIR]

Each variant is run once undisturbed. Then a random process of the same run (supervisor, driver,
worker, Ray's own) gets SIGKILL at a random moment of a start, an iteration or a save; what the
supervisor does not bring back is started again by the same command. The finished run has to equal
the undisturbed one bit by bit, and no process may be left behind. Prints the tables of
docs/reliability.md; exits with 1 at the first difference. The time that a kill takes, and so the
processes that there are, depends on the machine; the seed fixes what is tried.
"""

from __future__ import annotations

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

from mindspeed_rlxf.run.directory import RunDirectory
from tests.chaos.moments import POLL_S, Moment, Phase, Watch
from tests.chaos.same_run import differences
from tests.chaos.tiny_run import command
from tests.processes import start_logged, with_sources

ITERATIONS = 24
KILLS_OF_A_RUN = 13
START_S, ITERATION_S = 20.0, 0.5
LIMIT_S, GONE_S, LOOK_EVERY_S = 300.0, 60.0, 1.0
SEPARATE = ("placement.critic=critic", "resource_pool.main=1", "+resource_pool.critic=1")
ASYNC = ("training.async_save=true",)
VARIANTS = {
    "colocated": (),
    "colocated, asynchronous saves": ASYNC,
    "separate pools": SEPARATE,
    "separate pools, asynchronous saves": SEPARATE + ASYNC,
}
KINDS = {  # of processes, by a word of the command line; the first that is found counts
    "RayWorker": "worker",
    "ray::": "Ray's idle worker",
    "gcs_server": "Ray's gcs_server",
    "raylet/raylet": "Ray's raylet",
    "ray_gpt.py": "driver",
}
OTHER = "another of Ray's"


@dataclass(frozen=True)
class Kill:
    phase: Phase
    victim: str
    lost: int  # iterations that were done again
    recovery_s: float | None  # until the next new iteration; None = killed again before


class Attempt:
    """One start of the command, with every process that it was seen to have."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._child = start_logged(arguments, log, with_sources())
        self._process = psutil.Process(self._child.pid)
        self._seen: set[psutil.Process] = {self._process}
        self._looked_at = time.monotonic()

    def processes(self) -> list[psutil.Process]:
        """Processes that are alive, also those whose parent died."""
        for parent in list(self._seen):
            try:
                self._seen.update(parent.children(recursive=True))
            except psutil.NoSuchProcess:
                continue
        return [process for process in self._seen if _lives(process)]

    def goes_on(self) -> bool:
        if time.monotonic() - self._looked_at > LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self.processes()
        return self._child.poll() is None

    def kill_one(self, rng: random.Random) -> str:
        """Kill a process of a random kind; returns the kind."""
        by_kind: dict[str, list[psutil.Process]] = defaultdict(list)
        for process in self.processes():
            by_kind[self._kind(process)].append(process)
        kind = rng.choice(sorted(by_kind))
        victim = rng.choice(sorted(by_kind[kind], key=lambda process: process.pid))
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
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

    def left(self) -> list[str]:
        """End the processes that are left a minute after the end; returns their kinds."""
        psutil.wait_procs(self.processes(), timeout=GONE_S)
        left = self.processes()
        names = [self._kind(process) for process in left]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return names

    def status(self) -> int:
        return self._child.wait(timeout=LIMIT_S)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class KilledRun:
    """A run to its end, through at most `kills` kills."""

    def __init__(self, arguments: list[str], folder: Path, rng: random.Random, kills: int) -> None:
        self._arguments, self._folder = arguments, folder
        self._rng, self._left = rng, kills
        self._last: tuple[Phase, str] | None = None  # kill, and what the run does after it
        self._watch = Watch(RunDirectory(folder))
        self.kills: list[Kill] = []
        self.starts = 0

    def go(self) -> None:
        """Raises RuntimeError when the run fails without a kill, hangs, or leaves processes."""
        status = None
        while status != 0:
            if self.starts and self._last is None:
                raise RuntimeError(f"the undisturbed run ended with {status}")
            self.starts += 1
            attempt = Attempt(self._arguments, self._folder.with_suffix(".log"))
            self._watch.started()
            try:
                self._disturb(attempt)
                status = attempt.status()
            finally:
                left = attempt.left()
            print(f"  start {self.starts}: ended with {status}", flush=True)
            if left:
                raise RuntimeError(f"left behind: {', '.join(left)}")
        self._settle()

    def _disturb(self, attempt: Attempt) -> None:
        while self._left:
            moment = Moment.choose(self._rng, START_S, ITERATION_S, most_iterations=3)
            if not moment.wait(self._watch, attempt.goes_on, LIMIT_S):
                return
            phase, before = self._watch.phase(), self._watch.iterations()
            self._settle()
            self._last = phase, attempt.kill_one(self._rng)
            self._watch = Watch(RunDirectory(self._folder))
            self._left -= 1
            print(f"  {self._last[1]} killed in {phase.value}, iteration {before}", flush=True)
        while attempt.goes_on():
            self._watch.iterations()
            if time.monotonic() - max(self._watch.times) > LIMIT_S:
                raise RuntimeError(f"{self._folder}: no progress within {LIMIT_S:g} s")
            time.sleep(POLL_S)

    def _settle(self) -> None:
        if self._last is not None:
            self.kills.append(Kill(*self._last, self._watch.lost(), self._watch.recovery_s()))


def of_variant(name: str, output: Path, kills: int, rng: random.Random) -> tuple[list[Kill], int]:
    """Kills of runs of one variant, and how many starts they took."""
    output.mkdir(parents=True, exist_ok=True)
    more = (f"training.train_iters={ITERATIONS}", "training.save_interval=2", *VARIANTS[name])
    print(name, flush=True)
    KilledRun(command(output / "whole", *more), output / "whole", rng, 0).go()
    found: list[Kill] = []
    starts = 0
    for number in range(1, kills + 1):
        if len(found) >= kills:
            break
        folder = output / f"killed{number}"
        count = min(KILLS_OF_A_RUN, kills - len(found))
        run = KilledRun(command(folder, *more), folder, rng, count)
        run.go()
        wrong = differences(RunDirectory(output / "whole"), RunDirectory(folder), ITERATIONS)
        if wrong:
            raise RuntimeError(f"{folder} is not the undisturbed run: {'; '.join(wrong)}")
        found += run.kills
        starts += run.starts
    return found, starts


def table(kills: dict[str, list[Kill]], key: str) -> str:
    """Markdown: for each phase or victim the kills, lost iterations and times of recovery."""
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
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="all of them")
    parser.add_argument("--output", type=Path, help="kept; default: a temporary folder")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the run is ended as well
    names = arguments.variant or list(VARIANTS)
    output = arguments.output or Path(tempfile.mkdtemp(prefix="rlxf-chaos-"))
    kills: dict[str, list[Kill]] = {}
    began = time.monotonic()
    try:
        for number, name in enumerate(names):
            share = arguments.kills * (number + 1) // len(names) - sum(map(len, kills.values()))
            rng = random.Random(f"{arguments.seed} {name}")
            folder = output / name.replace(", ", "-").replace(" ", "-")
            kills[name], starts = of_variant(name, folder, share, rng)
            print(f"{name}: {len(kills[name])} kills, {starts} starts, the same run", flush=True)
    except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
        print(f"failed: {error}; see {output}", file=sys.stderr)
        return 1
    finally:
        print(table(kills, "phase"), table(kills, "victim"), sep="\n\n")
        print(f"\n{(time.monotonic() - began) / 60:.0f} min, seed {arguments.seed}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
