"""Whole runs under Ray that something is to happen to."""

from __future__ import annotations

import json
import os
import subprocess
import time
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
    """A command that was started, with what it was started with."""

    process: subprocess.Popen[str]
    folder: Path
    log: Path

    @property
    def tree(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def named(self, word: str) -> list[psutil.Process]:
        return [p for p in self.tree if word in " ".join(p.cmdline())]

    def failure(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "failure.json").read_text())
        return found

    def end(self) -> tuple[int, str, float]:
        """Status, output, seconds; fails when anything is left."""
        tree, started = self.tree, time.monotonic()
        code = self.process.wait(timeout=END_S)
        _, alive = psutil.wait_procs(tree, timeout=20)
        assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
        return code, self.log.read_text(encoding="utf-8"), time.monotonic() - started


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Starts the run; it comes back when the output says `until`: two workers are at work then.

    folder: of the run; variables: of its environment
    """
    started: list[Run] = []

    def begin(
        *more: str, until: str = "iteration: 2 /", folder: Path | None = None, **variables: str
    ) -> Run:
        folder, log = folder or tmp_path / "run", tmp_path / f"log{len(started)}"
        with open(log, "w") as stream:
            process = subprocess.Popen(
                command(folder, *SETTINGS, *more),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
                stdout=stream,
                stderr=stream,
                text=True,
            )  # fmt: skip
        run = Run(process, folder, log)
        started.append(run)
        deadline = time.monotonic() + START_S
        while until not in log.read_text(encoding="utf-8"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return run

    yield begin
    for run in started:
        for process in [*run.tree, run.process] if run.process.poll() is None else []:
            process.kill()
        run.process.wait()
