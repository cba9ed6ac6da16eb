"""A fault of a whole run gives one message, failure.json, the right status, and leaves no process.

The runs do not restart; `tests/unit/ops/test_supervisor.py` tests restarts.
"""

import signal
import time
from typing import Any

import pytest

from tests.long.conftest import assert_ended
from tests.processes import read_lines

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("process", "number", "message"),
    [
        ("RayWorker", signal.SIGKILL, "the process died"),
        ("RayWorker", signal.SIGSTOP, "rank 1 did not arrive within 20 s; "),
        ("raylet/raylet", signal.SIGKILL, "failed in"),
    ],
)
def test_a_fault_of_a_worker_is_one_message(start, process, number, message):
    run = start("training.max_restarts=0", "runtime.timeout_s=20")
    found = run.named(process)
    (found[-1] if process == "RayWorker" else found[0]).send_signal(number)
    line, failure = run.end_with_failure(within_s=60), run.failure()
    assert message in line and "Traceback" not in run.log.read_text()
    assert failure["message"] in line and failure["iteration"] >= 3
    assert failure["host"] and failure["rank"] in (0, 1) and failure["role"] != "driver"
    if number is signal.SIGSTOP:
        assert "no stack in its log: stopped" in line


def test_a_driver_killed_while_its_cluster_starts_is_started_again(start: Any) -> None:
    run = start("training.train_iters=2", until="run directory:")
    (driver,) = [p for p in run.tree if p.ppid() == run.process.pid]
    deadline = time.monotonic() + 60
    while not run.named("gcs_server"):
        assert driver.is_running() and time.monotonic() < deadline
        time.sleep(0.01)
    driver.kill()
    assert "restart: " in run.end(0)
    lines = read_lines(run.folder / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [1, 2]


def test_a_killed_supervisor_takes_everything_with_it(start: Any) -> None:
    run = start()
    tree = run.tree
    run.process.kill()
    run.process.wait()
    assert_ended(tree, 30)


def test_a_signal_stops_the_run_after_its_iteration(start: Any) -> None:
    run = start()
    run.process.send_signal(signal.SIGTERM)
    text = run.end(75)
    assert "SIGTERM: stops after this iteration" in text and "nothing is lost" in text
