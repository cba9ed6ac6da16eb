"""Trackers get every iteration once; their failures are warnings."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mindspeed_rlxf.reporting.trackers import (
    TRACKERS,
    TrackedRun,
    Tracker,
    Trackers,
    find_problems,
    register_tracker,
)
from tests.registries import restored_registries


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


def test_every_iteration_arrives_once_and_finite(tmp_path: Path, kept: type[Kept]) -> None:
    assert track(tmp_path, range(1, 4)) == []
    assert kept.got == [(i, {"x": float(i)}) for i in (1, 2, 3)]
    (run,) = kept.runs
    assert run.folder == tmp_path / "kept" and run.folder.is_dir() and kept.ended == 1


def test_a_run_resumed_from_an_earlier_checkpoint_keeps_the_first_record(
    tmp_path: Path, kept: type[Kept]
) -> None:
    track(tmp_path, range(6))
    track(tmp_path, range(4, 8))  # iterations 4 and 5 were there
    assert [i for i, _ in kept.got] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_failure_is_warned_of_once(tmp_path: Path, kept: type[Kept]) -> None:
    kept.fails_at = (2, 3, 5)
    (warning,) = track(tmp_path, range(1, 7))
    assert [i for i, _ in kept.got] == [1, 4, 6] and "refused" in warning
    kept.fails_at = ()
    track(tmp_path, range(5, 9))
    assert [i for i, _ in kept.got] == [1, 4, 6, 7, 8]


@pytest.mark.parametrize("error", [OSError("no route"), SystemExit(1)])
def test_a_tracker_that_does_not_start_is_warned_of_once(
    tmp_path: Path, kept: type[Kept], error: BaseException
) -> None:
    def broken(run: TrackedRun) -> Tracker:
        raise error

    register_tracker("broken")(broken)
    (warning,) = track(tmp_path, range(1, 4), "broken", "kept")
    assert warning.startswith(f"tracker broken failed: {type(error).__name__}")
    assert len(kept.got) == 3, "the others go on"


def test_unknown_trackers_and_missing_packages_are_problems(kept: type[Kept]) -> None:
    register_tracker("mine", module="no_such_package.inside", package="no-such-package")(kept)
    assert find_problems(["jsonl", "kept"]) == []
    unknown, missing = find_problems(["tensorbord", "mine"])
    assert unknown.value == "tensorbord" and "use tensorboard, or" in unknown.remedy
    assert missing.value == "mine" and "`pip install no-such-package`" in missing.remedy


def test_a_tracker_name_cannot_be_registered_twice(kept: type[Kept]) -> None:
    for name in ("kept", "wandb", "jsonl"):
        with pytest.raises(ValueError, match=name):
            register_tracker(name)(kept)
    assert "jsonl" not in TRACKERS
