"""Start whole runs under Ray, into which tests then put faults."""

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
# One restart is allowed, so that a supervisor runs and has to handle the faults too.
SETTINGS = ("training.train_iters=1000", "runtime.timeout_s=120", "training.max_restarts=1")


@dataclass
class Run:
    """A started run, with its run directory and the file of its output."""

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path

    @property
    def tree(self) -> list[psutil.Process]:
        """All processes that descend from the command."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def named(self, word: str) -> list[psutil.Process]:
        """Return the processes of `tree` whose command line contains the word."""
        return [p for p in self.tree if word in " ".join(p.cmdline())]

    def failure(self) -> dict[str, Any]:
        """Return the content of failure.json."""
        found: dict[str, Any] = json.loads((self.folder / "failure.json").read_text())
        return found

    def end(self, code: int) -> str:
        """Wait for the end; return the output.

        Fails the test for an exit code other than `code`, or for a process that does not end.
        """
        tree = self.tree
        found = self.process.wait(timeout=END_S)
        assert_ended(tree, 20)
        text = self.log.read_text(encoding="utf-8")
        assert found == code, text
        return text

    def end_with_failure(self, within_s: float = END_S) -> str:
        """Wait for the run to fail; return the one line of its output that begins `failed: `."""
        started = time.monotonic()
        text = self.end(1)
        assert time.monotonic() - started < within_s, text
        return only_line("failed: ", text)


def assert_ended(processes: list[psutil.Process], timeout_s: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Start a run and return when its output contains `until`; two workers compute by then.

    more: overrides; folder: run directory; variables: environment. All runs are killed at the end.
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
