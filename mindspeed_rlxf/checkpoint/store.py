"""The `checkpoints` folder: find, check, publish and remove checkpoints; the driver's state.

A checkpoint is written to a hidden folder, renamed once everything is on disk; then the pointer
file gets its iteration. A manifest lists every file with size and hash.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from mindspeed_rlxf.checkpoint.directory import RunDirectory, readable
from mindspeed_rlxf.config.problems import Problem, neighbours, use
from mindspeed_rlxf.config.schema import SAVED_AS, RunConfig
from mindspeed_rlxf.config.sections import TrainingConfig
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.weights.atomic import sync_folder
from mindspeed_rlxf.weights.state_files import (
    MANIFEST,
    Entry,
    entries_below,
    find_damage,
    patiently,
    write_text,
)

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
POINTER = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
EXPORTED = "exported_iteration.txt"
WENT_BACK = "resumed_from_iteration.txt"
NAME = re.compile(r"iter_(\d{7,})")
REMOVED = ".removed"  # at the end of the hidden name of what is being removed
UNUSED = ".unused"  # behind the name of a checkpoint that was set aside
TRAINER = "trainer"  # folder of the driver's files STATE and CONFIG
STATE = "state.json"
CONFIG = "config.yaml"
AHEAD = "ahead"
"""Folder with the samples that were generated ahead of training; a checkpoint is whole without."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder named like a checkpoint; `read` checks completeness.

    `find_whole_checkpoints` fills `state`, the driver's: "iteration", "trainer"
    (`PpoTrainer.state_dict`), "positions" (`line_positions`), "prompts_digest" (`hash_prompts`),
    "score" (None if not validated) and "score_metric".
    """

    path: Path
    iteration: int
    state: dict[str, Any] = field(default_factory=dict)

    def read(self) -> Manifest:
        """Read the manifest and check the size, not the content, of each listed file.

        Raises ValueError if the manifest is damaged or from another iteration, or a file is missing
        or has another size; FileNotFoundError without a manifest. Files of AHEAD are not checked.
        """
        manifest = Manifest.from_json((self.path / MANIFEST).read_bytes())
        if manifest.iteration != self.iteration:
            raise ValueError(f"{MANIFEST} is of iteration {manifest.iteration}")
        needed = [entry for entry in manifest.files if not entry["path"].startswith(f"{AHEAD}/")]
        damage = find_damage(self.path, needed, by_hash=False)
        if damage:
            raise ValueError("; ".join(damage))
        return manifest


@dataclass(frozen=True)
class Manifest:
    """Files in a checkpoint, and the versions and layouts that wrote it."""

    iteration: int
    files: list[Entry]
    about: dict[str, Any]
    """Versions and layouts that wrote the checkpoint; for people."""

    def to_json(self) -> str:
        """Return the manifest as JSON, with format version and a hash over all other content."""
        content = {
            "format_version": FORMAT_VERSION,
            "iteration": self.iteration,
            **self.about,
            "files": self.files,
        }
        return json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse the output of `to_json`; ValueError if changed, or of another version."""
        try:
            about = json.loads(text)
            stated_hash = about.pop("sha256")
            actual_hash = _digest(about)
            version = about.pop("format_version")
            iteration = about.pop("iteration")
            files = about.pop("files")
        except (ValueError, KeyError):
            raise ValueError(f"{MANIFEST} differs from what was written") from None
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{MANIFEST} has format_version {version}, this version reads {FORMAT_VERSION}"
            )
        if stated_hash != actual_hash:
            raise ValueError(f"{MANIFEST} differs from what was written (sha256)")
        return cls(iteration, files, about)


class RunStore:
    """A run's checkpoint folder, with files that name iterations.

    These are the latest, the best, the exported one, and the one that `training.resume_from` went
    back to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def newest_first(self) -> list[Checkpoint]:
        """Return the published checkpoints, newest first, unchecked; [] without the folder."""
        try:
            names = patiently(lambda: os.listdir(self.folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        checkpoints = []
        for name in names:
            match = NAME.fullmatch(name)
            if match is not None:
                checkpoints.append(Checkpoint(self.folder / name, int(match[1])))
        return sorted(checkpoints, key=lambda checkpoint: -checkpoint.iteration)

    def hidden(self, iteration: int) -> Path:
        """Return the hidden folder in which a checkpoint is written."""
        return self.folder / f".iter_{iteration:07d}"

    def path(self, iteration: int) -> Path:
        """Return the folder of a published checkpoint."""
        return self.folder / f"iter_{iteration:07d}"

    def begin(self, iteration: int) -> Path:
        """Remove all unfinished checkpoints; create and return the hidden folder for a new one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clear_unfinished()
        hidden = self.hidden(iteration)
        hidden.mkdir()
        return hidden

    def clear_unfinished(self) -> None:
        """Remove unfinished and half-removed checkpoints."""
        for path in self.folder.glob(".*"):
            self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a folder, file or link (not its target).

        It gets a hidden name first, so no half-removed checkpoint looks published. Network file
        systems keep files open elsewhere (`.nfs*`): the next save tries again.
        """
        doomed = path
        try:
            if path.suffix != REMOVED:
                doomed = self.folder / f".{path.name}.{secrets.token_hex(4)}{REMOVED}"
                os.replace(path, doomed)
            if doomed.is_dir() and not doomed.is_symlink():
                shutil.rmtree(doomed, ignore_errors=True)
                if doomed.exists():
                    doomed.rmdir()  # raises with the reason
            else:
                doomed.unlink()
        except OSError as error:
            logger.warning("%s cannot be removed now (%s)", doomed, error.strerror)

    def commit(self, manifest: Manifest) -> Path:
        """Publish a checkpoint: write the manifest, rename the hidden folder, update the pointer.

        Returns the final path. An older checkpoint with this name is set aside (`move_aside`).
        """
        hidden = self.hidden(manifest.iteration)
        final = self.path(manifest.iteration)
        write_text(hidden / MANIFEST, manifest.to_json())
        for folder in (hidden, *(path for path in hidden.rglob("*") if path.is_dir())):
            sync_folder(folder)
        if final.exists():  # damaged, or of a run that went back to before it
            self.move_aside(Checkpoint(final, manifest.iteration))
        os.replace(hidden, final)
        sync_folder(self.folder)
        self.point(POINTER, manifest.iteration)
        return final

    def point(self, name: str, iteration: int | None) -> None:
        """Write an iteration to POINTER, BEST, EXPORTED or WENT_BACK; None removes the file."""
        if iteration is None:
            (self.folder / name).unlink(missing_ok=True)
        else:
            write_text(self.folder / name, f"{iteration}\n")

    def move_aside(self, checkpoint: Checkpoint) -> Path:
        """Rename a checkpoint to NAME.unused, replacing an older one; return the new path."""
        aside = checkpoint.path.with_name(f"{checkpoint.path.name}{UNUSED}")
        if aside.exists():
            self._remove(aside)
        os.replace(checkpoint.path, aside)
        return aside

    def set_aside_after(self, iteration: int, copied: Sequence[Path]) -> Path | None:
        """Move the checkpoints after an iteration into a new folder beside them, which is kept.

        The folder gets copies of the files `copied` that exist. Returns it; None if there is no
        such checkpoint.
        """
        newer = []
        for checkpoint in self.newest_first():
            if checkpoint.iteration > iteration:
                newer.append(checkpoint)
        if not newer:
            return None
        name = f"after_{iteration:07d}"
        aside = self.folder / name
        for number in count(2):
            if not aside.exists():
                break
            aside = self.folder / f"{name}-{number}"
        aside.mkdir()
        for file in copied:
            if file.exists():
                shutil.copy2(file, aside / file.name)
        for checkpoint in newer:
            os.replace(checkpoint.path, aside / checkpoint.path.name)
        sync_folder(self.folder)
        return aside

    def prune(self, keep_last: int, keep_every: int, best: int | None = None) -> None:
        """Remove all but the newest `keep_last`, multiples of `keep_every` (0 = none) and `best`.

        Also removes `NAME.unused` folders from before the two newest remaining iterations.
        """
        kept_paths = []
        for age, checkpoint in enumerate(self.newest_first()):
            is_multiple = keep_every > 0 and checkpoint.iteration % keep_every == 0
            if age < keep_last or is_multiple or checkpoint.iteration == best:
                kept_paths.append(checkpoint.path)
            else:
                self._remove(checkpoint.path)
        for folder in self.folder.glob(f"iter_*{UNUSED}"):
            if folder < min(kept_paths[:2]):  # the names sort by iteration
                self._remove(folder)

    def exported(self) -> int | None:
        """Return the iteration whose weights were exported; None if unknown."""
        return self._read(EXPORTED)

    def goes_back_to(self, training: TrainingConfig) -> int | None:
        """Return the iteration of `resume_from`; None if an earlier start went back to it.

        So the same command, given again after a stop, goes on. None also with `new_run`.
        """
        went_back = training.resume_from == self._read(WENT_BACK)
        return None if training.new_run or went_back else training.resume_from

    def _read(self, name: str) -> int | None:
        try:
            return int(readable((self.folder / name).read_text))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def find_whole_checkpoints(
    config: RunConfig, store: RunStore
) -> tuple[list[Checkpoint], list[str]]:
    """Return (complete checkpoints, newest first; one line per damaged one).

    Complete: all file sizes match, no trained role lacks files, and the driver's files have their
    hashes. The roles' ranks hash their own files later. Raises StorageUnreadable.
    """
    complete: list[Checkpoint] = []
    problems = []
    folder_names = [name for role, name in SAVED_AS.items() if role in config.roles]
    folder_names.append(TRAINER)
    for checkpoint in readable(store.newest_first):
        try:
            complete.append(readable(functools.partial(_read_state, checkpoint, folder_names)))
        except (ValueError, OSError) as error:
            problems.append(f"{checkpoint.path} is damaged: {error}")
    return complete, problems


def _read_state(checkpoint: Checkpoint, folder_names: Sequence[str]) -> Checkpoint:
    """Return the checkpoint with its `state`; ValueError if it is not complete."""
    manifest = checkpoint.read()
    missing = [name for name in folder_names if not entries_below(name, manifest.files)]
    if missing:
        raise ValueError(f"no files of {' and '.join(missing)}")
    folder = checkpoint.path / TRAINER
    damage = find_damage(folder, entries_below(TRAINER, manifest.files))
    if damage:
        raise ValueError("; ".join(f"{TRAINER}/{problem}" for problem in damage))
    return replace(checkpoint, state=json.loads((folder / STATE).read_bytes()))


def no_whole_checkpoint(directory: RunDirectory, problems: Sequence[str]) -> Problem:
    """Return the problem with a run whose checkpoints were all refused."""
    rule = f"can be resumed from: {'; '.join(problems)}"
    remedy = "put the files back, or set training.new_run=true"
    return Problem(f"no checkpoint of {directory.path}", rule, remedy=remedy)


def check_chosen(config: RunConfig) -> list[Problem]:
    """Return a problem if `training.resume_from` or `validation.checkpoint` names no checkpoint."""
    directory = RunDirectory.of_run(config)
    store = RunStore(directory.checkpoints)
    if config.validation.only:
        key = "validation.checkpoint"
        iteration = config.validation.checkpoint
    else:
        key = "training.resume_from"
        iteration = store.goes_back_to(config.training)
    if iteration is None or config.training.new_run:
        return []
    complete, damaged = find_whole_checkpoints(config, store)
    complete_iterations = [checkpoint.iteration for checkpoint in reversed(complete)]
    if iteration in complete_iterations:
        return []
    rule = f"must be the iteration of a whole checkpoint in {store.folder}"
    reasons = [line for line in damaged if line.startswith(f"{store.path(iteration)} ")]
    if complete_iterations:
        newest = complete_iterations[-1]
        remedy = use(sorted({*neighbours(iteration, complete_iterations), newest}))
    else:
        remedy = "remove it, there is none"
    return [Problem(key, "; ".join([rule, *reasons]), iteration, remedy)]


def check_resume(config: RunConfig, directory: RunDirectory) -> list[Problem]:
    """Return a problem if all checkpoints are damaged, or `train_iters` is below the one to resume.

    That is the newest, or the one of `training.resume_from`.
    """
    store = RunStore(directory.checkpoints)
    complete, problems = find_whole_checkpoints(config, store)
    if not complete:
        return [no_whole_checkpoint(directory, problems)] if problems else []
    iteration = store.goes_back_to(config.training) or complete[0].iteration
    train_iters = config.training.train_iters
    if iteration <= train_iters:
        return []
    rule = f"must be at least the {iteration} iterations that the run in {directory.path} has done"
    remedy = f"use {iteration} or more, or training.new_run=true"
    return [Problem("training.train_iters", rule, train_iters, remedy)]


def is_finished(config: RunConfig, directory: RunDirectory) -> bool:
    """Return whether the newest checkpoint has `train_iters` iterations and was exported.

    A run that `training.resume_from` takes back is not finished. `check_resume` refuses a run with
    more iterations.
    """
    store = RunStore(directory.checkpoints)
    if store.goes_back_to(config.training) is not None:
        return False
    complete, _ = find_whole_checkpoints(config, store)
    if not complete:
        return False
    return complete[0].iteration == store.exported() == config.training.train_iters


def describe_start(config: RunConfig) -> list[str]:
    """Return how a command for training begins: anew, or where it resumes and the changed keys.

    Of a command that the run refuses only the changed keys.

    Raises UserError if the last configuration of the run cannot be read.
    """
    directory = RunDirectory.choose(config)
    if not directory.is_used:
        return [f"starts at iteration 1, in {directory.path}"]
    if is_finished(config, directory):
        train_iters = config.training.train_iters
        return [f"{directory.path} has its {train_iters} iterations already, so nothing is done"]
    store = RunStore(directory.checkpoints)
    complete, _ = find_whole_checkpoints(config, store)
    iteration = store.goes_back_to(config.training)
    if iteration is None and complete:
        iteration = complete[0].iteration
    if RunDirectory.check(config) or check_chosen(config):
        start = ""  # refused
    elif iteration is None:
        start = "resumes at iteration 1, as there is no checkpoint"
    else:
        start = f"resumes at iteration {iteration + 1}, from {store.path(iteration)}"
    lines = [start] if start else []
    for change in directory.compare_with(config):
        lines.append(f"changed since the last start: {change}")
    return lines


def hash_prompts(
    prompts: Sequence[Prompt], eos_token_ids: Sequence[int], reads_extra_info: bool = False
) -> str:
    """Return the SHA-256 (hex) over a run's prompts, in order, and EOS ids, in any order.

    `reads_extra_info` includes the rows' other columns, passed to reward functions.
    """
    digest = hashlib.sha256(json.dumps(sorted(eos_token_ids)).encode())
    for prompt in prompts:
        digest.update(len(prompt.token_ids).to_bytes(8, "little"))
        digest.update(prompt.token_ids.astype("<i8").tobytes())
        labels: list[Any] = [prompt.ground_truth, prompt.data_source]
        if reads_extra_info and prompt.extra_info:
            labels.append(prompt.extra_info)
        digest.update(json.dumps(labels, sort_keys=True).encode())
    return digest.hexdigest()


def cut_files(directory: RunDirectory, positions: dict[str, int]) -> None:
    """Truncate each line file to its length at the checkpoint (`positions`), 0 if absent there.

    Missing and shorter files stay as they are.
    """
    for file in directory.line_files:
        if file.exists():  # removed samples stay away
            with open(file, "r+b") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.truncate(min(size, positions.get(file.name, 0)))
                os.fsync(stream.fileno())


def find_shortened_file(directory: RunDirectory, positions: dict[str, int]) -> str:
    """Return a message on the first line file shorter than at the checkpoint, "" if none.

    Sample files may be shorter: users remove them, and no state depends on them.
    """
    for file in (directory.metrics, directory.health, directory.consumed):
        checkpoint_bytes = positions.get(file.name, 0)
        try:
            file_bytes = readable(file.stat).st_size
        except FileNotFoundError:
            file_bytes = 0
        if file_bytes < checkpoint_bytes:
            return f"{file} has {file_bytes} bytes, the checkpoint counts {checkpoint_bytes}"
    return ""


def line_positions(directory: RunDirectory) -> dict[str, int]:
    """Fsync each existing line file; return file name -> bytes."""
    positions = {}
    for file in directory.line_files:
        if file.exists():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
                positions[file.name] = stream.seek(0, os.SEEK_END)
    return positions
