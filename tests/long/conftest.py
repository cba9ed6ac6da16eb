"""Whole runs under Ray that something is to happen to."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.tiny_run import command
from tests.processes import only_line, start_logged, wait_for, with_sources

START_S, END_S = 240.0, 150.0
# With a supervisor, which the faults are to reach.
SETTINGS = ("training.train_iters=1000", "runtime.timeout_s=120", "training.max_restarts=1")


@dataclass
class Run:
    """A command that was started, with its folder and its output."""

    process: subprocess.Popen[bytes]
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

    def end(self, code: int) -> str:
        """Wait for the end; returns the output. Fails for another code, or processes that stay."""
        tree = self.tree
        found = self.process.wait(timeout=END_S)
        assert_ended(tree, 20)
        text = self.log.read_text(encoding="utf-8")
        assert found == code, text
        return text

    def end_with_failure(self, within_s: float = END_S) -> str:
        """The one line of the failure of a run that fails."""
        started = time.monotonic()
        text = self.end(1)
        assert time.monotonic() - started < within_s, text
        return only_line("failed: ", text)


def assert_ended(processes: list[psutil.Process], timeout_s: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Start the run; returns when the output has `until`: two workers compute then.

    folder: of the run; variables: of its environment
    """
    started: list[Run] = []

    def begin(
        *more: str, until: str = "iteration: 2 /", folder: Path | None = None, **variables: str
    ) -> Run:
        folder, log = folder or tmp_path / "run", tmp_path / f"log{len(started)}"
        process = start_logged(command(folder, *SETTINGS, *more), log, with_sources(**variables))
        started.append(Run(process, folder, log))
        wait_for(until, log, process, START_S)
        return started[-1]

    yield begin
    for run in started:
        for process in [*run.tree, run.process] if run.process.poll() is None else []:
            process.kill()
        run.process.wait()
