"""When a run is saved, which checkpoint it resumes from, and when it is finished."""

import builtins
import errno
import io
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mindspeed_rlxf.checkpoint import checkpoints
from mindspeed_rlxf.checkpoint.checkpoints import RunCheckpoints
from mindspeed_rlxf.checkpoint.store import (
    BEST,
    EXPORTED,
    MANIFEST,
    POINTER,
    Manifest,
    check_chosen,
    check_resume,
    describe_start,
    hash_prompts,
    is_finished,
)
from mindspeed_rlxf.cluster.errors import StorageUnreadable
from mindspeed_rlxf.config.keys import to_yaml
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.weights import state_files
from mindspeed_rlxf.weights.state_files import entry_of
from tests.unit.checkpoint.runs import Answer, Case, MakeTree, trainer_state

NewCase = Callable[..., Case]


@pytest.fixture
def new_case(make_tree: MakeTree, tmp_path: Path) -> NewCase:
    """Keyword arguments are keys of the training section."""
    return lambda **keys: Case(make_tree, tmp_path, **keys)


@pytest.fixture
def case(new_case: NewCase) -> Case:
    return new_case()


@pytest.mark.parametrize(("keys", "due_at"), [
    ({}, 1800),  # nothing else would save
    ({"save_interval": 11}, 1800),  # over train_iters
    ({"save_interval": 4}, None),
    ({"save_interval": 4, "save_interval_s": 60.0}, 60),
    ({"save_interval_s": 0.0}, None),
])  # fmt: skip
def test_a_save_is_due_by_time_by_interval_and_at_the_end(new_case, keys, due_at):
    case = new_case(train_iters=10, **keys)
    seconds = [s for s in (59, 60, 1799, 1800, 9999) if is_due_at(case, s)]
    assert (seconds[0] if seconds else None) == due_at
    case.clock.now = 0
    every = 4 if keys.get("save_interval") == 4 else 11
    assert [n for n in range(1, 11) if case.checkpoints.is_due(n)] == [*range(every, 10, every), 10]


def is_due_at(case: Case, seconds: float) -> bool:
    case.clock.now = seconds
    return case.checkpoints.is_due(1)


def test_a_run_resumes_from_the_newest_checkpoint(case):
    case.iterate(1, 2)
    case.checkpoints.write(3, case.notes.append)
    with case.directory.metrics.open("a") as file:
        file.write('{"iteration": 3}\n{"iter')  # after the checkpoint, and cut off
    assert case.store.hidden(3).exists()
    assert case.resume() == 2 and case.checkpoints.newest == 2
    assert (case.actor.loaded, case.critic.loaded) == ("actor 2", "critic 2")
    assert case.lines == [1, 2]
    assert not case.store.hidden(3).exists(), "its disk space is needed"


@pytest.mark.parametrize("file", ["actor/state", "critic/state", "trainer/state.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_loaded(case, file):
    case.iterate(1, 2)
    damaged = case.store.path(2) / file
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert case.resume() == 1
    assert case.lines == [1] and case.actor.loaded == "actor 1"
    assert f"{file} differs from what was written (sha256)" in case.notes[0]
    assert (case.store.folder / "iter_0000002.unused").is_dir()
    assert (case.store.folder / POINTER).read_text() == "1\n"
    case.iterate(2)
    assert case.lines == [1, 2]


class BrokenStorage:
    """Lets opens of files below a folder fail, from now on.

    times: number of opens that fail; each fails as long as it is positive
    """

    def __init__(self, folder: Path, times: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.times = str(folder), times
        for module, name in ((os, "open"), (io, "open"), (builtins, "open"), (os, "listdir")):
            monkeypatch.setattr(module, name, self._failing(getattr(module, name)))
        monkeypatch.setattr(state_files, "PAUSES_S", (0.0,) * 6)

    def _failing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, *args: Any, **keys: Any) -> Any:
            if self.times > 0 and str(path).startswith(self.folder):
                self.times -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return original(path, *args, **keys)

        return opened


@pytest.mark.parametrize(
    "folder",
    [*(f"checkpoints/iter_0000002/{part}" for part in ("", "trainer", "actor")), "checkpoints", ""],
)
def test_read_errors_that_last_end_the_attempt_and_change_nothing(case, folder, monkeypatch):
    case.iterate(1, 2)
    case.checkpoints.write(3, case.notes.append)
    before = {path: path.stat().st_mtime_ns for path in case.directory.path.rglob("*")}
    storage = BrokenStorage(case.directory.path / folder, math.inf, monkeypatch)
    with pytest.raises(StorageUnreadable, match="Input/output error"):
        case.resume()
    storage.times = 0
    assert before == {path: path.stat().st_mtime_ns for path in case.directory.path.rglob("*")}
    assert case.resume() == 2 and case.actor.loaded == "actor 2"


def test_a_checkpoint_that_cannot_be_removed_is_a_warning_until_a_later_save_removes_it(
    case, monkeypatch, caplog
):
    """As on NFS, where files that are open elsewhere stay as `.nfs*`."""
    rmdir = os.rmdir

    def busy(path: Any, **keys: Any) -> None:
        if str(path).endswith(".removed"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        rmdir(path, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        case.iterate(1, 2, 3)
        assert case.resume() == 3
        case.iterate(4)
    assert case.kept == [4, 3] and "cannot be removed now" in caplog.text
    assert len(list(case.store.folder.glob(".*.removed"))) == 2
    case.iterate(5)
    assert case.kept == [5, 4] and not list(case.store.folder.glob(".*"))


def test_a_command_without_its_run_directory_counts_as_stopped(case, monkeypatch):
    case.iterate(1)
    BrokenStorage(case.directory.path, math.inf, monkeypatch)
    for check in (check_resume, is_finished):
        with pytest.raises(StorageUnreadable):
            check(case.config, case.directory)


def test_a_checkpoint_whose_manifest_lacks_a_part_is_damaged(case):
    case.iterate(1, 2)
    newest = case.store.newest_first()[0]
    files = [entry for entry in newest.read().files if not entry["path"].startswith("critic/")]
    (newest.path / MANIFEST).write_text(Manifest(2, files, {}).to_json())
    assert case.resume() == 1
    assert "iter_0000002 is damaged: no files of critic; resuming from" in case.notes[0]


def test_a_run_with_only_damaged_checkpoints_is_refused_and_unchanged(case):
    case.iterate(1, 2)
    (case.store.path(1) / "actor" / "state").unlink()
    (case.store.path(2) / "critic" / "state").write_bytes(b"")
    with pytest.raises(UserError) as refused:
        case.resume()
    for part in ("iter_0000002 cannot", "iter_0000001 cannot", "training.new_run=true"):
        assert part in str(refused.value)
    assert case.lines == [1, 2] and case.kept == [2, 1]


def test_a_run_without_a_checkpoint_starts_again(case):
    case.directory.metrics.write_text('{"iteration": 1}\n')
    assert case.resume() == 0
    assert case.directory.metrics.read_text() == ""
    assert case.notes == ["no checkpoint to resume from: starting again from iteration 0"]


def test_other_prompts_are_refused(case):
    case.iterate(1)
    with pytest.raises(UserError, match=r"data\.train_files must give the prompts of the run"):
        case.resume(prompts="others")
    assert not case.actor.loaded


def test_an_asynchronous_save_is_published_once_all_wrote(new_case):
    case, published = new_case(async_save=True), list[int]()
    case.checkpoints.on_publish = published.append
    case.iterate(1)
    case.actor.write()
    time.sleep(1.0)
    assert case.kept == [] and case.checkpoints.newest == 0, "the critic still writes"
    case.critic.write()
    await_newest(case, 1)
    assert case.kept == published == [1]
    case.iterate(2)
    case.checkpoints.close()  # as after an error
    assert case.resume() == 1, "killed while 2 is being written"
    assert case.actor.loaded == "actor 1" and case.lines == [1]
    case.iterate(2)
    case.checkpoints.settle(case.notes.append)
    assert case.kept == [2, 1] and case.notes[-1].startswith("checkpoint of iteration 2: ")
    case.checkpoints.settle(case.notes.append)  # nothing is left to do
    assert case.checkpoints.write_s == 7.0


def await_newest(case: Case, iteration: int) -> None:
    deadline = time.monotonic() + 60
    while case.checkpoints.newest != iteration:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("scores", "kept"), [
    ([0.1, 0.7, None, 0.7, 0.2, 0.3], [6, 5, 2]),
    ([float("nan"), 0.7, float("nan"), 0.1, 0.2], [5, 4, 2]),
], ids=["the earliest of equals", "NaN is never the best"])  # fmt: skip
def test_the_best_validated_checkpoint_is_kept_too(case, scores, kept):
    for iteration, score in enumerate(scores, start=1):
        case.resume()  # scores are read from the disk
        case.iterate(iteration, score=score)
    assert case.kept == kept


def test_a_file_names_the_best_checkpoint_by_the_metric_of_the_configuration(case, new_case):
    best = case.store.folder / BEST
    case.iterate(1)
    assert not best.exists(), "it has no score"
    case.iterate(2, score=0.5)
    case.iterate(3, score=0.25)
    assert best.read_text() == "2\n"
    by_maj = case.config.validation.model_copy(update={"best_metric": "mean@1"})
    case.config = case.config.model_copy(update={"validation": by_maj})
    case.resume()
    case.iterate(4, score=0.125)
    assert best.read_text() == "4\n" and case.kept == [4, 3], (
        "scores of another metric do not count"
    )
    with case.directory.metrics.open("a") as file:
        file.write("{}\n")
    (case.store.path(4) / "actor" / "state").write_text("wrong")
    assert case.resume() == 3 and not best.exists(), "the best one was set aside"


def test_validation_alone_reads_the_newest_whole_checkpoint_and_changes_nothing(case):
    case.iterate(1, 2)
    (case.store.path(2) / "actor" / "state").write_text("actor 9")  # of the same size
    case.checkpoints.write(3, case.notes.append)  # a live run
    before = {path: path.stat().st_mtime_ns for path in case.directory.path.rglob("*")}
    case.notes.clear()
    roles: Any = SimpleNamespace(actor=case.actor, critic=None)
    found = RunCheckpoints(case.config, roles, case.directory, "", writes=False)
    assert found.load_newest(case.notes.append) == 1
    assert (case.actor.loaded, case.critic.loaded) == ("actor 1", "")
    assert "iter_0000002 cannot be resumed from: actor/state" in case.notes[0]
    assert case.notes[1] == f"weights of {case.store.path(1)}"
    assert before == {path: path.stat().st_mtime_ns for path in case.directory.path.rglob("*")}
    (case.store.path(1) / "actor" / "state").write_text("wrong")
    with pytest.raises(UserError, match=r"no checkpoint of .* can be resumed from"):
        found.load_newest(case.notes.append)


def test_validation_alone_reads_the_chosen_checkpoint_or_names_those_there_are(new_case):
    case = new_case(keep_last=9)
    case.iterate(2, 4, 6)
    (case.store.path(6) / "actor" / "state").write_text("actor 9")
    roles: Any = SimpleNamespace(actor=case.actor, critic=None)
    beside = RunCheckpoints(case.config, roles, case.directory, "", writes=False)
    assert beside.load_newest(case.notes.append, 2) == 2 and case.actor.loaded == "actor 2"
    with pytest.raises(UserError, match="iter_0000006 cannot be resumed from"):
        beside.load_newest(case.notes.append, 6)

    def check(checkpoint: int) -> list[str]:
        changes = {"only": True, "checkpoint": checkpoint}
        validation = case.config.validation.model_copy(update=changes)
        return [*map(str, check_chosen(case.config.model_copy(update={"validation": validation})))]

    assert check(4) == []
    (problem,) = check(3)
    assert "validation.checkpoint=3" in problem and problem.endswith("; use 2 or 4 or 6")


def test_a_run_goes_back_once_and_loses_nothing(new_case):
    """The same command again, after a stop, goes on."""
    case = new_case(keep_last=9)
    case.iterate(1, 2, score=0.5)
    case.iterate(3, 4, score=0.75)
    (case.store.path(4) / "actor" / "state").unlink()  # no warning, as it is not wanted
    case.store.point(EXPORTED, 4)
    back = new_case(keep_last=9, resume_from=2, train_iters=4)
    assert not is_finished(back.config, back.directory)
    assert check_chosen(back.config) == check_resume(back.config, back.directory) == []
    assert back.resume() == 2 and back.actor.loaded == "actor 2"
    assert back.lines == [1, 2] and back.kept == [2, 1]
    aside = back.store.folder / "after_0000002"
    assert sorted(path.name for path in aside.iterdir()) == [
        "config.yaml", "iter_0000003", "iter_0000004", "metrics.jsonl",
    ]  # fmt: skip
    assert (aside / "metrics.jsonl").read_text().count("\n") == 4
    assert (back.store.folder / BEST).read_text() == "1\n", "the others are gone"
    assert not any("warning" in note for note in back.notes)
    back.iterate(3)
    assert back.resume() == 3, "the same command goes on"
    back.iterate(4)
    assert not is_finished(back.config, back.directory), "killed during the export"
    again = new_case(keep_last=9)
    assert again.resume() == 4
    again = new_case(keep_last=9, resume_from=2)
    assert again.resume() == 2 and (again.store.folder / "after_0000002-2").is_dir()
    assert (aside / "iter_0000003").is_dir() and again.lines == [1, 2]


def test_a_new_run_goes_back_to_nothing_and_its_restart_goes_on(new_case):
    new = new_case(resume_from=2, new_run=True)
    assert new.resume() == 0 and not new.notes
    new.iterate(1)
    assert new_case(resume_from=2).resume() == 1


class Ahead:
    """A rollout that saves one file of samples and counts how often it is read."""

    num_loads = 0

    def save_ahead(self, folder: Path) -> Answer:
        (folder / "samples").write_text("of later iterations")
        return Answer([entry_of(folder, folder / "samples")])

    def load_ahead(self, folder: Path) -> Answer:
        self.num_loads += 1
        return Answer()


@pytest.mark.parametrize("seen_by_first", [[], ["samples is missing"]])
def test_the_first_rank_says_for_all_whether_samples_of_later_iterations_are_damaged(
    case, seen_by_first
):
    """A rank that draws them again beside one that goes on with them would draw other prompts."""
    rollout = case.config.rollout.model_copy(update={"max_staleness": 2})
    config = case.config.model_copy(update={"rollout": rollout})
    ahead = Ahead()
    roles: Any = SimpleNamespace(actor=case.actor, critic=case.critic, rollout=ahead)
    saving = RunCheckpoints(config, roles, case.directory, "p")
    saving.write(1, case.notes.append)
    saving.commit(1, {**trainer_state(1), "stream": {}}, None, case.notes.append)
    if not seen_by_first:
        (case.store.path(1) / "ahead" / "samples").unlink()
    later_rank = RunCheckpoints(
        config, roles, case.directory, "p", False, agree=lambda _: seen_by_first
    )
    state = later_rank.restore(case.notes.append)
    assert ("stream" in state["trainer"], ahead.num_loads) == (
        (False, 0) if seen_by_first else (True, 1)
    )


def test_a_plan_says_where_a_run_begins_and_what_has_changed(new_case, make_tree, tmp_path):
    fresh = resolve(make_tree({"training.output_dir": str(tmp_path / "new")}), "test")
    assert describe_start(fresh) == [f"starts at iteration 1, in {tmp_path / 'new'}"]
    case = new_case(keep_last=9)
    case.directory.config.write_text(to_yaml(case.config))
    assert describe_start(case.config)[0].startswith("resumes at iteration 1, as there is no")
    case.iterate(2, 3, 4)
    assert describe_start(case.config) == [f"resumes at iteration 5, from {case.store.path(4)}"]
    changed = new_case(keep_last=9, resume_from=2, keep_every=7).config
    assert describe_start(changed) == [
        f"resumes at iteration 3, from {case.store.path(2)}",
        "changed since the last start: training.keep_every: 0 -> 7",
    ]
    changed_model = new_case(keep_last=9, bf16=True).config  # refused, as is a wrong resume_from
    for refused in (new_case(keep_last=9, resume_from=1).config, changed_model):
        assert not any("resumes" in line for line in describe_start(refused))
    case.store.point(EXPORTED, 4)
    assert "nothing is done" in describe_start(new_case(keep_last=9, train_iters=4).config)[0]


def test_a_run_goes_back_to_none_but_a_whole_checkpoint(new_case):
    new_case(keep_last=9).iterate(1, 2, 4, 5)
    lacking = new_case(resume_from=3)
    (problem,) = check_chosen(lacking.config)
    assert "training.resume_from=3" in str(problem) and str(problem).endswith("; use 2 or 4 or 5")
    damaged = new_case(resume_from=4)
    (damaged.store.path(4) / "trainer" / "state.json").write_text("")
    (problem,) = check_chosen(damaged.config)
    assert "iter_0000004 is damaged" in str(problem) and str(problem).endswith("; use 2 or 5")
    late = new_case(resume_from=4, train_iters=3)
    assert "must be at least the 4" in str(check_resume(late.config, late.directory)[0])


def test_a_checkpoint_with_more_metrics_than_the_file_has_is_not_resumed(case):
    case.iterate(1, 2)
    case.directory.metrics.write_bytes(case.directory.metrics.read_bytes()[:17])
    assert case.resume() == 1 and case.actor.loaded == "actor 1"
    assert "has 17 bytes, the checkpoint counts 34" in case.notes[0]


def test_metrics_are_on_the_disk_before_the_checkpoint_has_its_name(case, monkeypatch):
    synced: list[str] = []
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    case.iterate(1)
    manifest = next(i for i, name in enumerate(synced) if "manifest" in name)
    assert "metrics.jsonl" in synced[:manifest]


def test_a_run_is_finished_when_its_weights_are_exported(new_case):
    case = new_case(train_iters=2)
    case.iterate(1)
    assert not is_finished(case.config, case.directory)
    case.iterate(2)
    assert not is_finished(case.config, case.directory), "killed during the export"
    case.store.point(EXPORTED, 2)
    assert is_finished(case.config, case.directory)
    longer = new_case(train_iters=3)
    assert not is_finished(longer.config, longer.directory)
    shorter = new_case(train_iters=1)
    (problem,) = check_resume(shorter.config, shorter.directory)
    assert "must be at least the 2 iterations that the run" in str(problem)
    assert [check_resume(each.config, each.directory) for each in (longer, case)] == [[], []]


def test_samples_that_were_removed_or_shortened_keep_no_run_from_resuming(case):
    line = '{"iteration": 1, "sample_id": 0}\n'
    case.directory.samples.write_text(line * 2)
    case.iterate(1)
    case.directory.samples.write_text(line)
    assert case.resume() == 1 and case.directory.samples.read_text() == line
    case.directory.samples.unlink()
    assert case.resume() == 1 and not case.directory.samples.exists()


def test_a_checkpoint_without_the_files_of_a_rank_gets_no_name(case, monkeypatch):
    case.iterate(1)
    monkeypatch.setattr(checkpoints, "SEEN_WITHIN_S", 0.0)
    monkeypatch.setattr(case.critic, "write", lambda: None)
    with pytest.raises(RuntimeError, match="files of all ranks of critic"):
        case.iterate(2)
    assert case.kept == [1]


def test_the_hash_of_prompts_depends_on_all_that_is_trained_on():
    def prompt(tokens: list[int], truth: str = "1") -> Prompt:
        return Prompt(0, "", np.array(tokens), truth, "test")

    base = hash_prompts([prompt([1, 2]), prompt([3])], [2, 0])
    assert base == hash_prompts([prompt([1, 2]), prompt([3])], [0, 2])
    others = [
        hash_prompts([prompt([1]), prompt([2, 3])], [2, 0]),
        hash_prompts([prompt([3]), prompt([1, 2])], [2, 0]),
        hash_prompts([prompt([1, 2], "2"), prompt([3])], [2, 0]),
        hash_prompts([prompt([1, 2]), prompt([3])], [2]),
    ]
    assert len({base, *others}) == 5
    # else a run of an older version, which hashed no other columns, could not go on
    rows = [Prompt(0, "", np.array([1]), "1", "test", extra) for extra in ({}, {"a": 1}, {"a": 2})]
    assert len({hash_prompts([row], [2]) for row in rows}) == 1
    assert len({hash_prompts([row], [2], reads_extra_info=True) for row in rows}) == 3
