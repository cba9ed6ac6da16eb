"""The folders of the trained weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.checkpoint.checkpoints import RunCheckpoints
from mindspeed_rlxf.checkpoint.directory import RunDirectory, export_folders
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.load import resolve, resolve_with_notes


class Group:
    """A role that exports one file to each folder."""

    group = property(lambda self: self)

    def call_engine(self, method: object, *folders: Path) -> Group:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "weights").write_text("w")
        return self

    def result(self) -> None: ...


def test_an_export_replaces_an_earlier_one(make_tree, tmp_path):
    config = resolve(make_tree({}), "test")
    roles: Any = SimpleNamespace(actor=Group(), critic=Group())
    old = tmp_path / "final" / "actor_megatron"
    old.mkdir(parents=True)
    (old / "__7_0.distcp").write_text("of more ranks")
    RunCheckpoints(config, roles, RunDirectory(tmp_path), "").export_weights()
    found = sorted(str(p.relative_to(tmp_path / "final")) for p in tmp_path.rglob("weights"))
    assert found == [
        f"{name}_{kind}/weights" for name in ("actor", "critic") for kind in ("hf", "megatron")
    ]
    assert not (old / "__7_0.distcp").exists()


@pytest.mark.parametrize(("saves", "actor", "critic"), [
    ({}, "run/final/actor_hf", "run/final/critic_hf"),
    ({"actor_rollout.save": "a"}, "a/hf", "run/final/critic_hf"),
    ({"actor_rollout.save": "a", "critic.save": "b"}, "a/hf", "b/hf"),
    ({"actor_rollout.save": "a", "critic.save": "./a"}, "a/actor/hf", "a/critic/hf"),
])  # fmt: skip
def test_the_save_keys_name_the_folders_of_the_final_weights(
    make_tree, tmp_path, monkeypatch, saves, actor, critic
):
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
