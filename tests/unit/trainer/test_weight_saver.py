"""Where the trained weights go, and that a checkpoint is whole or not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.resolve import resolve, resolve_with_notes
from mindspeed_rlxf.reporting.run_dir import RunDirectory
from mindspeed_rlxf.trainer.weight_saver import WeightSaver, export_folders, save_problems
from tests.unit.config.conftest import make_tree, no_cluster

__all__ = ["make_tree", "no_cluster"]
MakeTree = Callable[..., dict[str, Any]]


class Group:
    """A role that writes a file where it is told to; `fails` once half is written."""

    def __init__(self, writes: bool = True, fails: bool = False) -> None:
        self.writes, self.fails = writes, fails
        self.asked: list[tuple[Path | None, Path]] = []

    def export(self, hf_folder: Path | None, megatron_folder: Path) -> Group:
        self.asked.append((hf_folder, megatron_folder))
        if self.writes:
            megatron_folder.mkdir(parents=True)
            (megatron_folder / "weights").write_text("w")
        return self

    def result(self) -> None:
        if self.fails:
            raise RuntimeError("lost")


def saver(
    make_tree: MakeTree, folder: Path, actor: Group, critic: Group | None, **keys: Any
) -> tuple[WeightSaver, list[str]]:
    class Roles:
        pass

    roles: Any = Roles()
    roles.actor, roles.critic = actor, critic
    config = resolve(make_tree({f"training.{k}": v for k, v in keys.items()}), "test")
    said: list[str] = []
    return WeightSaver(config, roles, RunDirectory(folder), said.append), said


def test_a_checkpoint_is_due_every_interval(make_tree: MakeTree, tmp_path: Path) -> None:
    every, _ = saver(make_tree, tmp_path, Group(), None, save_interval=2)
    assert [n for n in range(1, 7) if every.is_due(n)] == [2, 4, 6]
    never, _ = saver(make_tree, tmp_path, Group(), None)
    assert not any(never.is_due(n) for n in range(1, 7))


def test_a_checkpoint_holds_both_roles_and_the_pointer_names_it(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    actor, critic = Group(), Group()
    writer, said = saver(make_tree, tmp_path, actor, critic, save_interval=5)
    leftover = tmp_path / "checkpoints" / ".iter_0000010" / "actor"
    leftover.mkdir(parents=True)  # of a run that was killed here
    assert writer.save(10) >= 0
    folder = tmp_path / "checkpoints" / "iter_0000010"
    assert sorted(path.name for path in folder.iterdir()) == ["actor", "critic"]
    assert (folder / "critic" / "weights").read_text() == "w"
    pointer = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert pointer.read_text() == "10\n"
    assert sorted(p.name for p in folder.parent.iterdir()) == ["iter_0000010", pointer.name]
    assert said == [f"checkpoint of iteration 10: {folder}"]
    assert actor.asked[0][0] is None  # Megatron's format alone


def test_a_checkpoint_that_fails_is_not_there(make_tree: MakeTree, tmp_path: Path) -> None:
    writer, _ = saver(make_tree, tmp_path, Group(), Group(fails=True), save_interval=1)
    with pytest.raises(RuntimeError, match="lost"):
        writer.save(1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".iter_0000001"]


def test_a_checkpoint_on_other_hosts_is_told_and_gets_no_name(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    writer, said = saver(make_tree, tmp_path, Group(), Group(writes=False), save_interval=1)
    writer.save(1)
    assert "checkpoint of iteration 1 is not whole here, critic wrote to" in said[0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".iter_0000001"]


@pytest.mark.parametrize(
    ("saves", "actor", "critic"),
    [
        ({}, "run/final/actor_hf", "run/final/critic_hf"),
        ({"actor_rollout.save": "a"}, "a/hf", "run/final/critic_hf"),
        ({"actor_rollout.save": "a", "critic.save": "b"}, "a/hf", "b/hf"),
        ({"actor_rollout.save": "a", "critic.save": "./a"}, "a/actor/hf", "a/critic/hf"),
    ],
)
def test_save_says_where_the_final_weights_go(
    make_tree: MakeTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: dict[str, str],
    actor: str, critic: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    config, notes = resolve_with_notes(make_tree(saves), "test")
    found = [
        export_folders(config, role, tmp_path / "run" / "final")
        for role in (Role.ACTOR_ROLLOUT, Role.CRITIC)
    ]
    assert [hf for hf, _ in found] == [tmp_path / actor, tmp_path / critic]
    assert all(megatron == Path(str(hf).replace("hf", "megatron")) for hf, megatron in found)
    shared = [note for note in notes if "are one folder" in note]
    assert len(shared) == ("a/actor" in actor)


def test_nothing_is_written_over(make_tree: MakeTree, tmp_path: Path) -> None:
    config = resolve(make_tree({"critic.save": str(tmp_path / "c")}), "test")
    assert save_problems(config) == []
    (tmp_path / "c" / "megatron").mkdir(parents=True)
    (tmp_path / "c" / "iter_0000001").mkdir()  # what was loaded may stand beside it
    assert save_problems(config) == []
    (tmp_path / "c" / "megatron" / "x").write_text("")
    (problem,) = save_problems(config)
    assert problem.startswith(f"critic.save={str(tmp_path / 'c')!r} must not hold weights")


def test_an_interval_beyond_the_run_is_told(make_tree: MakeTree) -> None:
    notes = {
        interval: resolve_with_notes(make_tree({"training.save_interval": interval}), "test")[1]
        for interval in (0, 3, 4)  # of 3 iterations
    }
    assert notes == {
        0: [],
        3: [],
        4: [
            "training.save_interval=4 is over training.train_iters=3: nothing but the final export "
            "will be saved"
        ],
    }
