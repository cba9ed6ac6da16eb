"""A failure is one line on the console, and all its details in failure.json."""

import json

import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cluster.errors import RuntimeTimeout, WorkerError
from mindspeed_rlxf.trainer.run import report
from mindspeed_rlxf.trainer.stopping import StopRequest

RAISED = WorkerError("critic", 3, "b", "values", "ValueError: a\nbad number", "trace of the worker")
LATE = RuntimeTimeout("critic.values", 30, [2, 3], "why", ["b", "c"])


def in_iteration(number: int) -> StopRequest:
    stop = StopRequest(60.0)
    stop.iteration = stop.saved = number - 1
    stop.begin_iteration()
    return stop


def test_a_failed_worker_is_one_line_and_its_traceback_is_kept(tmp_path, capsys):
    report(RunDirectory(tmp_path), RAISED, in_iteration(5))
    assert capsys.readouterr().err == (
        "failed: critic rank 3 on b failed in values: ValueError: a bad number (iteration 5)\n"
        f"logs: {tmp_path}/logs; iteration 5 will run again, from the checkpoint of "
        "iteration 4\n"
    )
    found = json.loads((tmp_path / "failure.json").read_text())
    assert [found[k] for k in ("role", "rank", "host", "phase")] == ["critic", 3, "b", "values"]
    assert (found["iteration"], found["saved_iteration"]) == (5, 4)
    assert found["cause"] == "ValueError: a\nbad number" and found["error"] == "ValueError"
    assert (
        found["remote_traceback"] == "trace of the worker" and "WorkerError" in found["traceback"]
    )


@pytest.mark.parametrize(("error", "details"), [
    (
        LATE,  # the ranks that waited may differ from time to time, the cause does not
        {"role": "critic", "phase": "values", "rank": 2, "host": "b", "missing": [2, 3],
         "error": "RuntimeTimeout"},
    ),
    (
        OSError(28, "no space left"),
        {"role": "driver", "iteration": 0, "error": "OSError", "errno": 28,
         "message": "driver: OSError: [Errno 28] no space left"},
    ),
], ids=["late ranks", "driver"])  # fmt: skip
def test_the_failure_file_names_the_place_and_the_cause(tmp_path, error, details):
    report(RunDirectory(tmp_path), error, StopRequest(60.0))
    found = json.loads((tmp_path / "failure.json").read_text())
    assert {name: found[name] for name in details} == details
    assert [file.name for file in tmp_path.iterdir()] == ["failure.json"]


def test_a_failure_in_a_save_has_the_iteration_of_the_save(tmp_path):
    """Two failed saves with checkpoints in between must not count as one repeated failure."""
    stop = StopRequest(60.0)
    for iteration in (1, 2):
        stop.begin_iteration()
        stop.end_iteration(iteration)
        report(RunDirectory(tmp_path), OSError("no space left"), stop)
        assert json.loads((tmp_path / "failure.json").read_text())["iteration"] == iteration
