"""When the run is saved, what it goes on from, and when it is finished."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_rlxf.cluster.host_agent import Function, HostAgent, HostCall
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.resolve import resolve
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.run import host_files
from mindspeed_rlxf.run.checkpoints import RunCheckpoints
from mindspeed_rlxf.run.directory import RunDirectory
from mindspeed_rlxf.run.driver_state import (
    check_train_iters,
    cut_files,
    done_iterations,
    hash_prompts,
    is_finished,
)
from mindspeed_rlxf.run.store import MANIFEST, Manifest
from mindspeed_rlxf.weights.state_files import Loaded, Written, entry_of
from tests.unit.cluster.agents import InProcess
from tests.unit.config.conftest import make_tree, no_cluster

__all__ = ["make_tree", "no_cluster"]
MakeTree = Callable[..., dict[str, Any]]
HERE = InProcess("host-a")


class Answer:
    def __init__(self, report: Any) -> None:
        self.report = report

    def result(self) -> list[Any]:
        return [self.report]


class Role:
    """Its state is a text, in a file."""

    def __init__(self, state: str) -> None:
        self.state, self.loaded = state, ""
        self.hosts: list[HostAgent] = [HERE]
        self.others: dict[str, bytes] = {}  # files that it writes beside

    def begin_save(self, folder: Path) -> Answer:
        self.saving = folder, self.state
        return Answer(None)

    def end_save(self) -> Answer:
        folder, state = self.saving
        folder.mkdir(parents=True)
        for name, data in {"state": state.encode(), **self.others}.items():
            (folder / name).write_bytes(data)
        entries = [entry_of(folder, folder / name) for name in ("state", *self.others)]
        return Answer(Written(entries, seconds=7.0))

    def load_state(self, folder: Path) -> Answer:
        self.loaded = (folder / "state").read_text()
        return Answer(Loaded())


def trainer_state(iteration: int) -> dict[str, Any]:
    """As `PpoTrainer` gives it."""
    sampler = {"epoch": 0, "offset": 1, "num_prompts": 2, "seed": 3, "shuffle": 1}
    prompts = {"sampler": sampler, "next_sample_id": 4}
    return {"iteration": iteration, "kl": {"value": 0.5}, "prompts": prompts}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Case:
    """A run in `folder` whose roles are files."""

    def __init__(self, make_tree: MakeTree, folder: Path, **keys: Any) -> None:
        keys = {f"training.{k}": v for k, v in {"output_dir": str(folder), **keys}.items()}
        self.config = resolve(make_tree(keys), "test")
        self.directory = RunDirectory(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").touch()
        self.actor, self.critic, self.clock = Role("actor"), Role("critic"), Clock()
        self.said: list[str] = []
        self.again()

    def again(self, prompts: str = "p") -> None:
        """As a new process has it."""
        roles: Any = SimpleNamespace(actor=self.actor, critic=self.critic)
        arguments = self.config, roles, self.directory, prompts, True, self.clock
        self.checkpoints = RunCheckpoints(*arguments)

    def iterate(self, iteration: int, score: float | None = None) -> None:
        self.actor.state, self.critic.state = f"actor {iteration}", f"critic {iteration}"
        self.checkpoints.settle(self.said.append)
        self.checkpoints.write(iteration, self.said.append)
        with self.directory.metrics.open("a") as file:
            file.write(json.dumps({"iteration": iteration}) + "\n")
        self.checkpoints.commit(iteration, trainer_state(iteration), score, self.said.append)

    @property
    def lines(self) -> list[int]:
        text = self.directory.metrics.read_text()
        return [json.loads(line)["iteration"] for line in text.splitlines()]


def test_a_save_is_due_by_number_and_at_the_end(make_tree: MakeTree, tmp_path: Path) -> None:
    case = Case(make_tree, tmp_path, save_interval=4, train_iters=10)
    assert [n for n in range(1, 11) if case.checkpoints.is_due(n)] == [4, 8, 10]


@pytest.mark.parametrize(
    ("keys", "due_at"),
    [
        ({}, 1800),  # nothing else would save
        ({"save_interval": 11}, 1800),  # over train_iters
        ({"save_interval": 4}, None),
        ({"save_interval": 4, "save_interval_s": 60.0}, 60),
        ({"save_interval_s": 0.0}, None),
    ],
)
def test_a_save_is_due_by_time(
    make_tree: MakeTree, tmp_path: Path, keys: dict[str, Any], due_at: int | None
) -> None:
    case = Case(make_tree, tmp_path, train_iters=10, **keys)
    seconds = [s for s in (59, 60, 1799, 1800, 9999) if _due(case, s)]
    assert (seconds[0] if seconds else None) == due_at


def _due(case: Case, seconds: float) -> bool:
    case.clock.now = seconds
    return case.checkpoints.is_due(1)


def test_time_counts_from_the_last_save(make_tree: MakeTree, tmp_path: Path) -> None:
    case = Case(make_tree, tmp_path, train_iters=10, save_interval_s=60.0)
    case.clock.now = 50
    case.iterate(1)
    assert not _due(case, 109) and _due(case, 110)


def test_the_newest_checkpoint_is_gone_on_from(make_tree: MakeTree, tmp_path: Path) -> None:
    case = Case(make_tree, tmp_path)
    case.iterate(1)
    case.iterate(2)
    with case.directory.metrics.open("a") as file:
        file.write('{"iteration": 3}\n{"iter')  # after it, and cut off
    case.again()
    state = case.checkpoints.restore(case.said.append)
    assert state is not None and state["trainer"] == trainer_state(2)
    assert (case.actor.loaded, case.critic.loaded) == ("actor 2", "critic 2")
    assert case.lines == [1, 2]


@pytest.mark.parametrize("file", ["actor/state", "critic/state", "trainer/state.json"])
def test_a_damaged_one_is_named_and_the_one_before_is_taken(
    make_tree: MakeTree, tmp_path: Path, file: str
) -> None:
    case = Case(make_tree, tmp_path)
    case.iterate(1)
    case.iterate(2)
    damaged = case.directory.checkpoints / "iter_0000002" / file
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    case.again()
    case.said.clear()
    state = case.checkpoints.restore(case.said.append)
    assert state is not None and state["iteration"] == 1
    assert case.lines == [1] and case.actor.loaded == "actor 1"
    assert f"iter_0000002 is damaged: {file} is not what was written (sha256)" in case.said[0]
    assert (case.directory.checkpoints / "iter_0000002.unused").is_dir()
    pointer = case.directory.checkpoints / "latest_checkpointed_iteration.txt"
    assert pointer.read_text() == "1\n"
    case.iterate(2)  # is made anew
    assert case.lines == [1, 2]


class Recorder(InProcess):
    """Notes the files that it is asked to read."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.read: list[str] = []

    def start(self, function: Function, *args: Any, timeout_s: float) -> HostCall:
        if function is host_files.find_damage:
            self.read += [entry["path"] for entry in args[1]]
        return super().start(function, *args, timeout_s=timeout_s)


def test_hosts_of_a_role_share_the_reading_of_its_files(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    case, hosts = Case(make_tree, tmp_path), [Recorder("a"), Recorder("b")]
    case.actor.hosts = [*hosts]
    case.actor.others = {"one": b"1", "two": b"2"}
    case.iterate(1)
    case.again()
    assert case.checkpoints.restore(case.said.append) is not None
    assert [host.read for host in hosts] == [["state", "two"], ["one"]]


def test_a_hostile_file_is_refused_though_its_hash_is_right(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    """The manifest tells what was written, not who wrote it."""
    case = Case(make_tree, tmp_path)
    case.iterate(1)
    hostile = io.BytesIO()
    torch.save(print, hostile)  # any function that is not on the list
    case.actor.others = {"common.pt": hostile.getvalue()}
    case.iterate(2)
    case.again()
    case.said.clear()
    state = case.checkpoints.restore(case.said.append)
    assert state is not None and state["iteration"] == 1
    assert (case.actor.loaded, case.critic.loaded) == ("actor 1", "critic 1")
    assert "iter_0000002 is damaged: " in case.said[0]
    assert "actor/common.pt must hold nothing but the data of a checkpoint" in case.said[0]


@pytest.mark.parametrize("part", ["actor", "critic", "trainer"])
def test_one_that_lacks_a_part_of_the_run_is_not_gone_on_from(
    make_tree: MakeTree, tmp_path: Path, part: str
) -> None:
    """Whole by its manifest, which has no file of that part."""
    case = Case(make_tree, tmp_path)
    case.iterate(1)
    case.iterate(2)
    newest = case.checkpoints.store.newest_first()[0]
    written = newest.read()
    files = [entry for entry in written.files if not entry["path"].startswith(f"{part}/")]
    (newest.path / MANIFEST).write_text(Manifest(2, files, written.about).to_json())
    case.again()
    case.said.clear()
    state = case.checkpoints.restore(case.said.append)
    assert state is not None and state["iteration"] == 1 and case.actor.loaded == "actor 1"
    assert f"iter_0000002 is damaged: no files of {part}; an older one" in case.said[0]


def test_where_all_are_damaged_the_run_is_left_as_it_is(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    """To start again would cut its records, and prune what it saves before what is damaged."""
    case = Case(make_tree, tmp_path)
    case.iterate(1)
    case.iterate(2)
    (case.directory.checkpoints / "iter_0000001" / "actor" / "state").unlink()
    (case.directory.checkpoints / "iter_0000002" / "critic" / "state").write_bytes(b"")
    case.again()
    with pytest.raises(UserError) as refused:
        case.checkpoints.restore(case.said.append)
    for said in ("iter_0000002 is damaged", "iter_0000001 is damaged", "training.new_run=true"):
        assert said in str(refused.value)
    assert case.lines == [1, 2] and not case.actor.loaded
    assert [c.iteration for c in case.checkpoints.store.newest_first()] == [2, 1]


def test_without_a_checkpoint_the_run_starts_again(make_tree: MakeTree, tmp_path: Path) -> None:
    case = Case(make_tree, tmp_path)
    case.directory.metrics.write_text('{"iteration": 1}\n')
    assert case.checkpoints.restore(case.said.append) is None
    assert case.directory.metrics.read_text() == ""
    assert case.said == ["no checkpoint yet to go on from: starts from iteration 0 again"]


def test_other_prompts_are_refused(make_tree: MakeTree, tmp_path: Path) -> None:
    case = Case(make_tree, tmp_path)
    case.iterate(1)
    case.again(prompts="others")
    with pytest.raises(UserError, match=r"data\.train_files must give the prompts of the run"):
        case.checkpoints.restore(case.said.append)
    assert not case.actor.loaded


def test_two_checkpoints_are_kept(make_tree: MakeTree, tmp_path: Path) -> None:
    case = Case(make_tree, tmp_path)
    for iteration in range(1, 5):
        case.iterate(iteration)
    assert [c.iteration for c in case.checkpoints.store.newest_first()] == [4, 3]


def test_an_asynchronous_save_gets_its_name_when_all_is_written(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    case = Case(make_tree, tmp_path, async_save=True)
    case.iterate(1)
    assert case.checkpoints.store.newest_first() == [] and case.said == []
    case.iterate(2)
    assert [c.iteration for c in case.checkpoints.store.newest_first()] == [1]
    case.again()  # killed while 2 is being written
    state = case.checkpoints.restore(case.said.append)
    assert state is not None and state["iteration"] == 1
    assert case.actor.loaded == "actor 1" and case.lines == [1]
    case.iterate(2)
    case.checkpoints.settle(case.said.append)
    assert [c.iteration for c in case.checkpoints.store.newest_first()] == [2, 1]
    case.checkpoints.settle(case.said.append)  # nothing is left to do
    assert case.checkpoints.write_s == 7.0  # which a save at the end of a run takes longer


def test_the_best_validated_one_is_kept_too(make_tree: MakeTree, tmp_path: Path) -> None:
    case = Case(make_tree, tmp_path)
    for iteration, score in enumerate([0.1, 0.7, None, 0.7, 0.2, 0.3], start=1):
        case.again()  # what is the best is read from the disk
        case.iterate(iteration, score)
    assert [c.iteration for c in case.checkpoints.store.newest_first()] == [6, 5, 2]


def test_a_score_that_is_no_number_is_never_the_best(make_tree: MakeTree, tmp_path: Path) -> None:
    case = Case(make_tree, tmp_path)
    for iteration, score in enumerate([float("nan"), 0.7, float("nan"), 0.1, 0.2], start=1):
        case.iterate(iteration, score)
    assert [c.iteration for c in case.checkpoints.store.newest_first()] == [5, 4, 2]


def test_lines_that_a_crash_took_send_the_run_to_the_checkpoint_before(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    case = Case(make_tree, tmp_path)
    case.iterate(1)
    case.iterate(2)
    first = case.directory.metrics.read_text().splitlines(keepends=True)[0]
    case.directory.metrics.write_text(first)
    case.again()
    state = case.checkpoints.restore(case.said.append)
    assert state is not None and state["iteration"] == 1 and case.actor.loaded == "actor 1"
    assert any(
        "iter_0000002 cannot be resumed from" in line and "has 17 bytes of the 34" in line
        for line in case.said
    )


def test_lines_that_no_checkpoint_can_do_without_end_the_start(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    case = Case(make_tree, tmp_path)
    case.iterate(1)
    case.directory.metrics.write_text("")
    case.again()
    with pytest.raises(UserError, match=r"no checkpoint of .* can be resumed from: .* has 0 bytes"):
        case.checkpoints.restore(case.said.append)
    assert case.checkpoints.store.path(1).exists() and not case.actor.loaded


def test_what_is_written_of_metrics_is_on_the_disk_before_the_checkpoint_is(
    make_tree: MakeTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(make_tree, tmp_path)
    synced: list[str] = []
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    case.iterate(1)
    manifest = next(i for i, name in enumerate(synced) if "manifest" in name)
    assert "metrics.jsonl" in synced[:manifest]


def test_a_start_makes_room_and_knows_what_it_goes_on_from(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    case = Case(make_tree, tmp_path)
    case.iterate(1)
    case.checkpoints.write(2, case.said.append)
    assert case.checkpoints.store.hidden(2).exists()
    case.again()
    assert case.checkpoints.restore(case.said.append) is not None
    assert not case.checkpoints.store.hidden(2).exists()
    assert case.checkpoints.newest == 1


def test_a_run_is_finished_when_its_weights_are_exported(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    case = Case(make_tree, tmp_path, train_iters=2)
    case.iterate(1)
    assert not is_finished(case.config, case.directory)
    case.iterate(2)
    assert not is_finished(case.config, case.directory)  # killed while it exported
    case.checkpoints.store.set_exported(2)
    assert is_finished(case.config, case.directory)
    longer = Case(make_tree, tmp_path, train_iters=3)
    assert not is_finished(longer.config, longer.directory)
    shorter = Case(make_tree, tmp_path, train_iters=1)
    with pytest.raises(UserError, match="must be at least the 2 iterations that the run"):
        is_finished(shorter.config, shorter.directory)
    assert done_iterations(shorter.config, shorter.directory) == 2
    again = Case(make_tree, tmp_path, train_iters=1, new_run=True)
    assert done_iterations(again.config, again.directory) == 0
    assert [len(check_train_iters(case.config, n)) for n in (1, 2, 3)] == [
        0,
        0,
        1,
    ]  # a dry run tells it too


def test_lines_that_are_gone_are_told(make_tree: MakeTree, tmp_path: Path) -> None:
    case = Case(make_tree, tmp_path)
    case.directory.metrics.write_text("{}\n")
    with pytest.raises(UserError, match="must have the 9 bytes that it had at the checkpoint"):
        cut_files(case.directory, {"metrics.jsonl": 9})


def test_a_record_that_is_gone_is_no_run_to_go_on_with(make_tree: MakeTree, tmp_path: Path) -> None:
    case = Case(make_tree, tmp_path)
    case.iterate(1)
    case.directory.metrics.unlink()
    case.again()
    with pytest.raises(UserError, match=r"metrics\.jsonl has 0 bytes of the 17 that it had then"):
        case.checkpoints.restore(case.said.append)


def test_samples_that_were_cleared_away_are_told_and_begin_anew(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    case = Case(make_tree, tmp_path)
    case.directory.samples.write_text("{}\n")
    case.iterate(1)
    case.directory.samples.unlink()
    case.again()
    assert case.checkpoints.restore(case.said.append) is not None
    assert f"warning: {case.directory.samples} is gone; it starts with the next iteration" in (
        case.said
    )


def test_a_checkpoint_gets_no_name_without_a_file_that_a_rank_says_it_has(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    case = Case(make_tree, tmp_path)
    case.iterate(1)
    end_save = case.critic.end_save

    def lost() -> Answer:
        answer = end_save()
        (case.checkpoints.store.hidden(2) / "critic" / "state").unlink()
        return answer

    case.critic.end_save = lost  # type: ignore[method-assign]
    with pytest.raises(
        RuntimeError, match="iteration 2 is not whole: critic/state is missing; is "
    ):
        case.iterate(2)
    assert [each.iteration for each in case.checkpoints.store.newest_first()] == [1]


def test_the_digest_is_of_what_is_learnt_from() -> None:
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
