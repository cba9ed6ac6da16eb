"""A command from its configuration to its exit code, without a cluster; training is one save."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.checkpoint.checkpoints import RunCheckpoints
from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.checkpoint.store import EXPORTED
from mindspeed_rlxf.checkpoint.supervised import CHILD_OF
from mindspeed_rlxf.cluster.errors import DevicesMissing, WorkerError
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.roles.reports import FailedSample
from mindspeed_rlxf.roles.reward import RewardsFailed, check_failures
from mindspeed_rlxf.trainer import run as run_module
from mindspeed_rlxf.trainer.preflight import Prepared
from mindspeed_rlxf.trainer.run import describe_schedules
from mindspeed_rlxf.trainer.stopping import Stopped, StoppedByRule
from tests.unit.checkpoint.runs import stand_ins, trainer_state
from tests.unit.config.conftest import make_tree, no_cluster

__all__ = ["make_tree", "no_cluster"]


class Command:
    """The command of one run directory; `lacking` is the error of opening the cluster."""

    def __init__(self, make_tree: Callable[..., dict[str, Any]], root: Path) -> None:
        self.make_tree, self.folder, self.facts_file = make_tree, root / "run", root / "facts.json"
        self.lacking: Exception | None = None
        self.trained: list[int] = []
        self.validated: list[Path] = []
        self.ends: Exception | None = None  # what training raises

    def run(self, sections: dict[str, Any] | None = None, **training: Any) -> int:
        """sections: keys of other sections"""
        keys = {"output_dir": str(self.folder), "train_iters": 1, **training}
        changes = {f"training.{name}": value for name, value in keys.items()}
        tree = self.make_tree({**changes, **(sections or {})})
        self.facts_file.write_text("{}")
        return run_module.run(resolve(tree, "test"), Prepared())

    def facts(self) -> dict[str, Any]:
        """What the supervisor knows of the last start."""
        return json.loads(self.facts_file.read_text())

    def from_config(self, *_: object) -> Any:
        if self.lacking:
            raise self.lacking
        return SimpleNamespace(cluster=SimpleNamespace(own=True), shutdown=lambda: None)

    @contextlib.contextmanager
    def training(self, config: Any, _: Any, directory: RunDirectory, *__: Any) -> Iterator[Any]:
        roles: Any = SimpleNamespace(
            **dict(zip(("actor", "critic"), stand_ins(config), strict=True))
        )
        checkpoints = RunCheckpoints(config, roles, directory, "prompts")
        checkpoints.restore(print)
        last = config.training.train_iters
        checkpoints.write(last, print)
        checkpoints.commit(last, trainer_state(last), None, print)
        checkpoints.store.point(EXPORTED, last)
        self.trained.append(last)
        yield SimpleNamespace(fit=self.fit)

    def fit(self) -> None:
        if self.ends:
            raise self.ends

    def validate_only(self, _: Any, __: Any, directory: RunDirectory, *___: Any) -> int:
        self.validated.append(directory.path)
        directory.metrics.write_text("{}\n")
        return 4


@pytest.fixture
def command(make_tree, tmp_path, monkeypatch):
    found = Command(make_tree, tmp_path)
    ray = SimpleNamespace(RayRuntime=SimpleNamespace(from_config=found.from_config))
    monkeypatch.setitem(sys.modules, "mindspeed_rlxf.cluster.ray.runtime", ray)  # type: ignore[arg-type]
    monkeypatch.setattr(run_module, "training", found.training)
    monkeypatch.setattr(run_module, "validate_only", found.validate_only)
    monkeypatch.setenv(CHILD_OF, f"{os.getppid()}:0.0:{found.facts_file}")
    loggers = [logging.getLogger(f"mindspeed_rlxf{name}") for name in ("", ".runtime")]
    before = [list(logger.handlers) for logger in loggers]
    yield found
    for logger, handlers in zip(loggers, before, strict=True):
        for handler in [each for each in logger.handlers if each not in handlers]:
            logger.removeHandler(handler)
            handler.close()


def test_a_finished_run_is_not_started_again(command, capsys):
    assert command.run() == 0
    assert f"done: 1 iterations, {command.folder}" in capsys.readouterr().out
    files = sorted(command.folder.rglob("*"))
    assert command.run() == 0
    assert capsys.readouterr().out == (
        f"done already: {command.folder} has its 1 iterations; "
        "raise training.train_iters to continue\n"
    )
    assert command.trained == [1] and sorted(command.folder.rglob("*")) == files
    assert command.facts() == {}, "there is nothing to start again"


def test_what_a_run_says_is_in_its_log(command, capsys):
    assert command.run() == 0
    command.ends = Stopped()
    assert command.run(train_iters=2) == 75
    log = (command.folder / "logs" / "driver.log").read_text()
    printed = capsys.readouterr()
    starts = "run directory: ", "done: ", "note: changed", "stopped: "
    for start in starts:
        lines = f"{printed.out}{printed.err}".splitlines()
        line = next(line for line in lines if line.startswith(start))
        assert line in log


def test_a_finished_run_with_more_iterations_resumes_and_notes_the_changes(command, capsys):
    assert command.run() == 0
    assert "note: " not in capsys.readouterr().out
    assert command.run(train_iters=3, keep_last=5) == 0
    printed = capsys.readouterr().out.splitlines()
    changed = "note: changed since the last start: training."
    assert {f"{changed}train_iters: 1 -> 3", f"{changed}keep_last: 2 -> 5"} == {
        line for line in printed if line.startswith("note: ")
    }
    assert any(line.startswith(f"resumed from {command.folder}") for line in printed)
    assert command.trained == [1, 3] and (command.folder / "config.1.yaml").exists()


def test_more_iterations_stretch_the_schedules_of_the_learning_rate():
    def describe(warmup: float, decay: str) -> list[str]:
        schedule = {"lr_warmup_fraction": warmup, "lr_decay_style": decay}
        keys = [f"actor_rollout.{key}={value}" for key, value in schedule.items()]
        tree = compose("grpo_trainer_tiny", ["training.train_iters=30", *keys])
        return describe_schedules(resolve(tree, "test"))

    assert describe(0.0, "constant") == []
    for warmup, decay in ((0.0, "linear"), (0.5, "constant")):
        (line,) = describe(warmup, decay)
        assert line.startswith("actor_rollout: ") and "30 iterations" in line


def test_missing_devices_are_reported_and_end_with_75(command, capsys):
    command.lacking = DevicesMissing("8 devices are needed")
    assert command.run() == 75
    assert capsys.readouterr().err == "stopped: 8 devices are needed\n"
    assert not RunDirectory(command.folder).is_used, "the same command may take it again"


def test_validation_only_trains_nothing(command, capsys):
    """Also of a run that is finished; a failure of it is not started again."""
    assert command.run() == 0
    before = {path: path.stat().st_mtime_ns for path in command.folder.rglob("*")}
    capsys.readouterr()
    only = {"validation.only": True, "data.val_files": "val.jsonl"}
    assert command.run(only) == 0 and command.run(only) == 0
    folders = [command.folder / name for name in ("validation", "validation-2")]
    assert command.trained == [1] and command.validated == folders
    said = capsys.readouterr().out
    assert f"run directory: {folders[0]}" in said
    assert said.endswith(f"done: validation of iteration 4, {folders[1]}\n")
    assert command.facts() == {"joined": False}, "the supervisor knows of no directory"
    kept = [path for path in before if path.is_file()]
    assert all(path.stat().st_mtime_ns == before[path] for path in kept)


def test_a_run_that_a_rule_ended_is_a_failure_that_is_not_restarted(command, capsys):
    """75 would have schedulers give the same command again, 0 would say that it is done."""
    command.ends = StoppedByRule("kl_runaway", "the KL is 9")
    assert command.run(train_iters=3) == 1
    assert "failed: stopped by logging.stop_on=kl_runaway: the KL is 9" in capsys.readouterr().err
    assert "logging.stop_on" in command.facts()["no_restart"]
    failure = json.loads((command.folder / "failure.json").read_text())
    assert (failure["role"], failure["phase"]) == ("driver", "health")
    command.ends = Stopped()
    assert command.run(train_iters=4) == 75 and "no_restart" not in command.facts()


@pytest.mark.parametrize("count", [3, 5])
def test_a_reward_that_fails_for_most_samples_is_shown_and_not_tried_again(command, capsys, count):
    """3 of 6 may be the work of some rows, 5 of 6 are that of the function."""
    failed = [FailedSample(i, "exception", "KeyError: 'a'", False, "line 7") for i in range(count)]
    with pytest.raises(RewardsFailed) as error:
        check_failures([*failed, *[None] * (6 - count)], 0)
    command.ends = error.value
    assert command.run(train_iters=3) == 1
    assert "line 7" in capsys.readouterr().err
    assert json.loads((command.folder / "failure.json").read_text())["failed_sample"] == "line 7"
    assert "line 7" in (command.folder / "logs" / "driver.log").read_text()
    assert ("no_restart" in command.facts()) == (count == 5)


def test_a_run_that_lost_its_server_ends_with_75(command, capsys):
    command.ends = WorkerError("rollout", 0, "host", "generate", "EngineLost: it failed twice")
    assert command.run() == 75 and "no_restart" not in command.facts()
    assert "stopped: EngineLost: it failed twice" in capsys.readouterr().err


def test_a_server_that_refuses_its_options_is_a_mistake(command):
    cause = "OptionsRefused: api_server.py: error: unrecognized arguments: --nope (log)"
    command.ends = WorkerError("rollout", 0, "host", "update_weights", cause)
    with pytest.raises(UserError, match=r"^rollout\.vllm: .* arguments: --nope \(log\)$"):
        command.run()
    assert not RunDirectory(command.folder).is_used
