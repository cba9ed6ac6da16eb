"""Weights of what is trained: checkpoints on the way, and the final export.

A checkpoint holds weights in Megatron's format, no optimizer: it is no place to go on from.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import SAVED_AS, RunConfig
from mindspeed_rlxf.reporting.run_dir import RunDirectory
from mindspeed_rlxf.runtime.role_groups import ActorGroup, CriticGroup, RoleGroups

POINTER = "latest_checkpointed_iteration.txt"
HF, MEGATRON = "hf", "megatron"


class WeightSaver:
    def __init__(
        self,
        config: RunConfig,
        roles: RoleGroups,
        directory: RunDirectory,
        note: Callable[[str], None],
        writes: bool = True,
    ) -> None:
        """note: says a line to the user. writes: False on all but the first rank of torchrun."""
        self.config, self.note, self.writes = config, note, writes
        self.final = directory.path / "final"
        self.checkpoints = directory.checkpoints
        self.trained: dict[Role, ActorGroup | CriticGroup] = {Role.ACTOR_ROLLOUT: roles.actor}
        if roles.critic is not None:
            self.trained[Role.CRITIC] = roles.critic

    def is_due(self, iteration: int) -> bool:
        interval = self.config.training.save_interval
        return interval > 0 and iteration % interval == 0

    def save(self, iteration: int) -> float:
        """checkpoints/iter_0000010/{actor,critic}, whole or not there; returns the seconds it took.

        All ranks write into a hidden folder, which then gets its name; the pointer comes last.
        """
        started = time.monotonic()
        name = f"iter_{iteration:07d}"
        hidden = self.checkpoints / f".{name}"
        if self.writes and hidden.exists():
            shutil.rmtree(hidden)
        pending = [
            group.export(None, hidden / SAVED_AS[role]) for role, group in self.trained.items()
        ]
        for export in pending:
            export.result()
        if self.writes:
            self._publish(hidden, self.checkpoints / name, iteration)
        return time.monotonic() - started

    def _publish(self, hidden: Path, final: Path, iteration: int) -> None:
        missing = [
            n for r, n in SAVED_AS.items() if r in self.trained and not (hidden / n).is_dir()
        ]
        if missing:
            self.note(
                f"warning: the checkpoint of iteration {iteration} is not whole here, "
                f"{' and '.join(missing)} wrote to {hidden} of other hosts; use a "
                "training.output_dir that all hosts share"
            )
            return
        os.replace(hidden, final)
        _replace_text(self.checkpoints / POINTER, f"{iteration}\n")
        self.note(f"checkpoint of iteration {iteration}: {final}")

    def export(self) -> None:
        """Final weights, as Hugging Face folders and in Megatron's format."""
        pending = []
        for role, group in self.trained.items():
            pending.append(group.export(*export_folders(self.config, role, self.final)))
        for export in pending:
            export.result()


def export_folders(config: RunConfig, role: Role, final: Path) -> tuple[Path, Path]:
    """(Hugging Face, Megatron) folders of a trained role: under its `save`, else in `final`."""
    folder = config.save_folder(role)
    if folder is not None:
        return folder / HF, folder / MEGATRON
    return final / f"{SAVED_AS[role]}_{HF}", final / f"{SAVED_AS[role]}_{MEGATRON}"


def save_problems(config: RunConfig) -> list[str]:
    """Folders named by `save` that hold something already: nothing is written over."""
    problems = []
    for role in (role for role in config.roles if role in SAVED_AS):
        folder = config.save_folder(role)
        if folder is None:
            continue
        for path in (folder / HF, folder / MEGATRON):
            if path.is_dir() and any(path.iterdir()):
                problems.append(
                    f"{role.value}.save={str(folder)!r} must not hold weights, they would be "
                    f"written over in {path}; give another folder, or move them away"
                )
        above = next(p for p in (folder, *folder.parents) if p.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            problems.append(
                f"{role.value}.save={str(folder)!r} must be a folder that can be written, {above} "
                "cannot; give another one"
            )
    return problems


def _replace_text(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
