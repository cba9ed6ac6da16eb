"""Whole runs that something happens to: one message, failure.json, nothing left, the right status.

Without restarts, so that each fault is seen for itself; `tests/unit/trainer/test_supervisor.py` has
those.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.tiny_run import ROOT, command

START_S, END_S = 240.0, 150.0


# With a supervisor, which the faults are to reach.
SETTINGS = ("training.train_iters=1000", "runtime.timeout_s=120", "training.max_restarts=1")


@dataclass
class Run:
    """Two workers in their third iteration or so."""

    process: subprocess.Popen[str]
    folder: Path
    log: Path

    @property
    def tree(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def named(self, word: str) -> list[psutil.Process]:
        return [p for p in self.tree if word in " ".join(p.cmdline())]

    def end(self) -> tuple[int, str, float]:
        """Status, output, seconds; fails when anything is left."""
        tree, started = self.tree, time.monotonic()
        code = self.process.wait(timeout=END_S)
        _, alive = psutil.wait_procs(tree, timeout=20)
        assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
        return code, self.log.read_text(encoding="utf-8"), time.monotonic() - started


@pytest.fixture
def start(tmp_path: Path) -> Any:
    started: list[Run] = []

    def begin(*more: str) -> Run:
        folder, log = tmp_path / "run", tmp_path / "log"
        with open(log, "w") as stream:
            process = subprocess.Popen(
                command(folder, *SETTINGS, *more),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=stream,
                stderr=stream,
                text=True,
            )  # fmt: skip
        run = Run(process, folder, log)
        started.append(run)
        deadline = time.monotonic() + START_S
        while "iteration: 2 /" not in log.read_text(encoding="utf-8"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return run

    yield begin
    for run in started:
        for process in [*run.tree, run.process] if run.process.poll() is None else []:
            process.kill()
        run.process.wait()


def kill_worker(run: Run) -> None:
    run.named("RayWorker")[-1].kill()


def stop_worker(run: Run) -> None:
    run.named("RayWorker")[-1].send_signal(signal.SIGSTOP)


def kill_raylet(run: Run) -> None:
    run.named("raylet/raylet")[0].kill()


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (kill_worker, "the process died"),
        (stop_worker, "did not arrive within 30 s; "),
        (kill_raylet, "failed in"),
    ],
)
def test_a_fault_of_a_worker_is_one_message(
    start: Any, fault: Callable[[Run], None], message: str
) -> None:
    run = start("training.max_restarts=0")
    fault(run)
    code, text, seconds = run.end()
    assert code == 1 and seconds < 60, text
    (line,) = [line for line in text.splitlines() if line.startswith("failed: ")]
    assert message in line and "Traceback" not in text
    found = json.loads((run.folder / "failure.json").read_text(encoding="utf-8"))
    assert found["message"] in line and found["iteration"] >= 3
    assert found["host"] and found["rank"] in (0, 1) and found["role"] != "driver"
    if fault is stop_worker:
        assert "is stopped" in line
        logs = sorted((run.folder / "logs" / "main").iterdir())
        assert any("(most recent call first)" in log.read_text() for log in logs)


@pytest.mark.long
def test_a_killed_supervisor_takes_everything_with_it(start: Any) -> None:
    run = start()
    tree = run.tree
    run.process.kill()
    run.process.wait()
    _, alive = psutil.wait_procs(tree, timeout=30)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.long
def test_a_signal_stops_the_run_after_its_iteration(start: Any) -> None:
    run = start()
    run.process.send_signal(signal.SIGTERM)
    code, text, _ = run.end()
    assert code == 75, text
    assert "SIGTERM: stops after this iteration" in text and "nothing is lost" in text
