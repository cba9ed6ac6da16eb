"""The driver's state in checkpoints, and what a used run directory means for a command."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.schema import SAVED_AS, RunConfig
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.reporting.line_file import LineFile
from mindspeed_rlxf.run.directory import RunDirectory
from mindspeed_rlxf.run.state_schema import read_driver_state
from mindspeed_rlxf.run.store import Checkpoint, Manifest, RunStore, missing_parts
from mindspeed_rlxf.weights.state_files import content_problem

TRAINER = "trainer"
STATE, CONFIG = "state.json", "config.yaml"
MAX_PROBLEMS, MAX_PROBLEM = 4, 1500  # checkpoints, and characters of each, in an error


def checkpoint_parts(config: RunConfig) -> list[str]:
    """Subfolders of a checkpoint: one per trained role, and the driver's."""
    return [name for role, name in SAVED_AS.items() if role in config.roles] + [TRAINER]


@dataclass(frozen=True)
class WholeCheckpoint:
    """A checkpoint that the driver found whole. state: see `state_schema.DriverState`"""

    checkpoint: Checkpoint
    manifest: Manifest
    state: dict[str, Any]


def find_whole_checkpoints(
    config: RunConfig, store: RunStore
) -> tuple[list[WholeCheckpoint], list[str]]:
    """Return checkpoints with files of the right sizes, newest first, and a line per damaged one.

    The driver's part is hashed here; the workers hash the parts of the roles.
    """
    whole, problems = [], []
    for checkpoint in store.newest_first():
        try:
            manifest = checkpoint.read()
            missing = missing_parts(manifest, checkpoint_parts(config))
            if missing:
                raise ValueError(f"no files of {' and '.join(missing)}")
            folder = checkpoint.path / TRAINER
            found = [content_problem(folder, entry) for entry in manifest.part(TRAINER)]
            if damaged := [problem for problem in found if problem is not None]:
                raise ValueError("; ".join(f"{TRAINER}/{problem}" for problem in damaged))
            each = WholeCheckpoint(checkpoint, manifest, read_state(checkpoint))
        except (ValueError, OSError) as error:
            problems.append(f"{checkpoint.path} is damaged: {error}")
        else:
            whole.append(each)
    return whole, problems


def read_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """The driver's state, see `DriverState`. Errors: OSError, ValueError"""
    return read_driver_state(checkpoint.path / TRAINER / STATE, checkpoint.iteration)


def find_best_iterations(store: RunStore) -> list[int]:
    """The checkpoint with the highest validation score, the earliest of equals; [] = no scores."""
    scores: dict[int, float] = {}
    for checkpoint in store.newest_first():
        try:
            score = read_state(checkpoint).get("score")
        except (OSError, ValueError):
            continue  # damaged: nothing that is to be kept
        if isinstance(score, (int, float)) and abs(score) < math.inf:
            scores[checkpoint.iteration] = float(score)
    best = max(scores.values(), default=None)
    return [min(n for n, score in scores.items() if score == best)] if scores else []


def done_iterations(config: RunConfig, directory: RunDirectory) -> int:
    """Iteration of the checkpoint that the command would resume from; 0 = none."""
    if not directory.is_used or config.training.new_run:
        return 0
    whole, _ = find_whole_checkpoints(config, RunStore(directory.checkpoints))
    return whole[0].checkpoint.iteration if whole else 0


def read_newest_state(config: RunConfig, directory: RunDirectory) -> dict[str, Any] | None:
    """The driver's state that the command would resume from; None = a new run."""
    if not directory.is_used or config.training.new_run:
        return None
    whole, _ = find_whole_checkpoints(config, RunStore(directory.checkpoints))
    return whole[0].state if whole else None


def check_checkpoints(config: RunConfig, directory: RunDirectory) -> list[Problem]:
    """Report a run that has checkpoints of which the driver finds none whole."""
    if not directory.is_used or config.training.new_run:
        return []
    whole, problems = find_whole_checkpoints(config, RunStore(directory.checkpoints))
    return [] if whole or not problems else [no_whole_checkpoint(directory, problems)]


def no_whole_checkpoint(directory: RunDirectory, problems: Sequence[str]) -> Problem:
    """problems: a line for each checkpoint"""
    shown = [problem[:MAX_PROBLEM] for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    return Problem(
        f"no checkpoint of {directory.path}",
        f"can be resumed from: {'; '.join(shown)}",
        remedy="put the files back, or set training.new_run=true",
    )


def check_train_iters(config: RunConfig, done: int) -> list[Problem]:
    """Report a run that has done more iterations than `train_iters`. done: see `done_iterations`"""
    wanted = config.training.train_iters
    if done <= wanted:
        return []
    folder = RunDirectory.choose(config).path
    return [
        Problem(
            "training.train_iters",
            f"must be at least the {done} iterations that the run in {folder} has done",
            wanted,
            f"use {done} or more, or training.new_run=true",
        )
    ]


def is_finished(config: RunConfig, directory: RunDirectory) -> bool:
    """Return whether `train_iters` is reached and the weights were exported afterwards.

    Raises UserError where the run has gone further than `train_iters`.
    """
    done = done_iterations(config, directory)
    if problems := check_train_iters(config, done):
        raise UserError(problems)
    return done == config.training.train_iters == RunStore(directory.checkpoints).exported()


def hash_prompts(prompts: Sequence[Prompt], eos_token_ids: Sequence[int]) -> str:
    """Hash the data of a run: token ids, stop tokens, ground truths and data sources."""
    found = hashlib.sha256(json.dumps(sorted(eos_token_ids)).encode())
    for prompt in prompts:
        found.update(len(prompt.token_ids).to_bytes(8, "little"))
        found.update(prompt.token_ids.astype("<i8").tobytes())
        found.update(json.dumps([prompt.ground_truth, prompt.data_source]).encode())
    return found.hexdigest()


def cut_files(directory: RunDirectory, positions: dict[str, int]) -> None:
    """Cut each metric and sample file to its length at the checkpoint.

    Raises UserError where a file is shorter than that.
    """
    for file in line_files(directory):
        if not file.exists():  # see `find_shortened_file`
            continue
        try:
            file.cut(positions.get(file.path.name, 0))
        except ValueError as error:
            raise UserError(Problem("", str(error))) from None


def find_shortened_file(directory: RunDirectory, positions: dict[str, int]) -> str:
    """Describe a metric or sample file that is shorter than at the checkpoint; empty = none.

    Sample files may be removed altogether (`find_removed_samples`).
    """
    cleared = find_removed_samples(directory, positions)
    for file in line_files(directory):
        wanted = positions.get(file.path.name, 0)
        try:
            there = file.position()
        except OSError as error:
            return f"{error.filename or file.path} cannot be read ({error.strerror})"
        if file.path not in cleared and there < wanted:
            return f"{file.path} has {there} bytes of the {wanted} that it had then"
    return ""


def find_removed_samples(directory: RunDirectory, positions: dict[str, int]) -> list[Path]:
    """Sample files that a checkpoint counts and that were removed since."""
    return [
        path
        for path in _samples(directory)
        if positions.get(path.name, 0) and not LineFile(path).exists()
    ]


def _samples(directory: RunDirectory) -> tuple[Path, ...]:
    return directory.samples, directory.val_samples


def line_positions(directory: RunDirectory) -> dict[str, int]:
    """Sync each metric and sample file; return file name -> bytes, older parts included."""
    files = [file for file in line_files(directory) if file.exists()]
    for file in files:
        file.sync()
    return {file.path.name: file.position() for file in files}


def line_files(directory: RunDirectory) -> list[LineFile]:
    """The files that grow by lines during the run."""
    paths = directory.metrics, *_samples(directory), directory.consumed
    return [LineFile(path) for path in paths]
