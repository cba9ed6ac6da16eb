"""Trackers get every iteration once; their failures are warnings."""

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.reporting.trackers import (
    TRACKERS,
    TrackedRun,
    Tracker,
    Trackers,
    _choose_mode,
    find_problems,
    register_tracker,
)
from tests.registries import restored_registries
from tests.tracker_records import check_resumed_run, wandb_records


class Kept(Tracker):
    """A tracker that keeps what it gets, for all runs."""

    runs: list[TrackedRun]
    got: list[tuple[int, dict[str, float]]]
    fails_at: tuple[int, ...] = ()
    ended = 0

    def __init__(self, run: TrackedRun) -> None:
        type(self).runs.append(run)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration in self.fails_at:
            raise ConnectionError(f"refused {iteration}")
        self.got.append((iteration, dict(metrics)))

    def finish(self) -> None:
        type(self).ended += 1


@pytest.fixture
def kept() -> Iterator[type[Kept]]:
    with restored_registries():
        made = type("Made", (Kept,), {"runs": [], "got": []})
        register_tracker("kept")(made)
        yield made


def track(folder: Path, iterations: range, *names: str) -> list[str]:
    """Give the trackers these iterations, and end; returns the first warning of each."""
    warnings: dict[str, str] = {}
    run = TrackedRun("run", "project", "id", folder, {"a": 1})
    made = Trackers(names or ("jsonl", "kept", "kept"), run, warnings.setdefault)
    for i in iterations:
        made.log(i, {"x": float(i), "nan": float("nan"), "inf": float("-inf")})
    made.close()
    return list(warnings.values())


def test_every_iteration_arrives_once_and_finite_also_after_a_resume(tmp_path, kept):
    assert track(tmp_path, range(6)) == []
    (run,) = kept.runs
    assert run.folder == tmp_path / "kept" and run.folder.is_dir() and kept.ended == 1
    track(tmp_path, range(4, 8))  # iterations 4 and 5 were there
    assert kept.got == [(i, {"x": float(i)}) for i in range(8)]


def test_a_failure_is_warned_of_once(tmp_path, kept):
    kept.fails_at = (2, 3, 5)
    (warning,) = track(tmp_path, range(1, 7))
    assert [i for i, _ in kept.got] == [1, 4, 6] and "refused" in warning
    kept.fails_at = ()
    track(tmp_path, range(5, 9))
    assert [i for i, _ in kept.got] == [1, 4, 6, 7, 8]


@pytest.mark.parametrize("error", [OSError("no route"), SystemExit(1)])
def test_a_tracker_that_does_not_start_is_warned_of_once(tmp_path, kept, error):
    def broken(run: TrackedRun) -> Tracker:
        raise error

    register_tracker("broken")(broken)
    (warning,) = track(tmp_path, range(1, 4), "broken", "kept")
    assert warning.startswith(f"tracker broken failed: {type(error).__name__}")
    assert len(kept.got) == 3, "the others go on"


def test_unknown_trackers_and_missing_packages_are_problems(kept, monkeypatch):
    register_tracker("mine", module="no_such_package.inside", package="no-such-package")(kept)
    assert find_problems(["jsonl", "kept", "tensorboard", "wandb"]) == []
    unknown, missing = find_problems(["tensorbord", "mine"])
    assert unknown.value == "tensorbord" and "use tensorboard, or" in unknown.remedy
    assert missing.value == "mine" and "`pip install no-such-package`" in missing.remedy
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    (problem,) = find_problems(["wandb"])
    assert problem.value == "wandb" and "`pip install wandb`" in problem.remedy


def test_a_tracker_name_cannot_be_registered_twice(kept):
    for name in ("kept", "wandb", "jsonl"):
        with pytest.raises(ValueError, match=name):
            register_tracker(name)(kept)
    assert "jsonl" not in TRACKERS


@pytest.mark.long
def test_a_resumed_run_continues_its_records_offline(tmp_path):
    """Both at once, as a run may name them. wandb's record tells nothing of the machine."""
    check_resumed_run("tensorboard,wandb", tmp_path)
    records = list(wandb_records(tmp_path / "trackers" / "wandb"))
    assert {each.run.host for each in records if each.HasField("run")} == {"withheld"}
    assert not [each for each in records if each.HasField("environment")]
    assert not [file.path for each in records for file in each.files.files]


@pytest.mark.parametrize(("offline", "variables", "mode"), [
    (True, {"WANDB_MODE": "online", "WANDB_API_KEY": "k"}, "offline"),
    (True, {"WANDB_MODE": "disabled"}, "disabled"), (False, {}, "online"),
    (False, {"WANDB_MODE": "disabled"}, "disabled"), (None, {}, "offline"),
    (None, {"WANDB_API_KEY": "k"}, "online"),
    (None, {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
])  # fmt: skip
def test_a_run_that_is_offline_stays_so(offline, variables, mode, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run: Any = SimpleNamespace(offline=offline)
    assert _choose_mode(run, "WANDB") == mode
