"""Export the final weights of the trained roles."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rlxf.checkpoint.directory import RunDirectory, find_write_obstacle
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.schema import SAVED_AS, RunConfig
from mindspeed_rlxf.engine.train_engine import TrainEngine

if TYPE_CHECKING:  # it imports Megatron, and the checks before a run import this module
    from mindspeed_rlxf.roles.actor import ActorGroup
    from mindspeed_rlxf.roles.critic import CriticGroup

HF, MEGATRON = "hf", "megatron"


def export_weights(
    config: RunConfig,
    trained: dict[Role, ActorGroup | CriticGroup],
    directory: RunDirectory,
    writes: bool = True,
) -> None:
    """Write the folders of `export_folders` for each role, and wait until they are written.

    Args:
        writes: Remove existing folders first; False on all but the first rank of torchrun.
    """
    pending = []
    for role, each in trained.items():
        folders = export_folders(config, role, directory.path / "final")
        for folder in folders:
            if writes and folder.exists():
                shutil.rmtree(folder)
        pending.append(each.group.call_engine(TrainEngine.export, *folders))
    for export in pending:
        export.result()


def export_folders(config: RunConfig, role: Role, final: Path) -> tuple[Path, Path]:
    """Return the (Hugging Face, Megatron) folders of a role: in its `save`, else in `final`."""
    folder = config.save_folder(role)
    if folder is not None:
        return folder / HF, folder / MEGATRON
    return final / f"{SAVED_AS[role]}_{HF}", final / f"{SAVED_AS[role]}_{MEGATRON}"


def check_save_folders(config: RunConfig, directory: RunDirectory) -> list[Problem]:
    """Return problems of the `ROLE.save` folders that are new to the run in `directory`.

    They are subfolders for weights that are not empty, and folders that cannot be written.
    """
    problems = []
    for role in _find_new_saves(config, directory):
        folder, key = config.save_folder(role), f"{role.value}.save"
        if folder is None:
            continue
        for path in (folder / HF, folder / MEGATRON):
            if path.is_dir() and any(path.iterdir()):
                problems.append(
                    Problem(
                        key,
                        f"must not hold weights, the run would overwrite those in {path}",
                        repr(str(folder)),
                        "give another folder, or move them away",
                    )
                )
        if found := find_write_obstacle(folder):
            problems.append(
                Problem(
                    key,
                    f"must be a folder that can be written: {found}",
                    repr(str(folder)),
                    "give another one",
                )
            )
    return problems


def _find_new_saves(config: RunConfig, directory: RunDirectory) -> list[Role]:
    """Return the trained roles whose folder for weights is new to the run: all of a new run.

    The other folders may have earlier exports of this run. A change of one role's key can change
    both folders, because a folder that both roles name is divided.
    """
    trained = [role for role in config.roles if role in SAVED_AS]
    if not directory.config.exists():
        return trained
    try:
        before = {change.key: change.before for change in directory.compare_with(config)}
    except UserError:  # reported by `RunDirectory.check`
        return []
    sections = {
        role.value: config.role(role).model_copy(update={"save": before[f"{role.value}.save"]})
        for role in trained
        if f"{role.value}.save" in before
    }
    earlier = config.model_copy(update=sections)
    return [role for role in trained if earlier.save_folder(role) != config.save_folder(role)]
