"""Whole runs that something happens to: one message, failure.json, nothing left, the right status.

Without restarts, so that each fault is seen for itself; `tests/unit/ops/test_supervisor.py` has
those.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.long.conftest import Run


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
def test_a_driver_killed_while_its_cluster_starts_is_started_again(start: Any) -> None:
    run = start("training.train_iters=2", until="run directory:")
    (driver,) = [p for p in run.tree if p.ppid() == run.process.pid]
    deadline = time.monotonic() + 60
    while not run.named("gcs_server"):
        assert driver.is_running() and time.monotonic() < deadline
        time.sleep(0.01)
    driver.kill()
    code, text, _ = run.end()
    assert code == 0 and "restart: " in text, text
    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2]


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
