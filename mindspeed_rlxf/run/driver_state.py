"""The state of the driver in a checkpoint, and what a used run directory means for a command."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.schema import SAVED_AS, RunConfig
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.files.plain import read_json
from mindspeed_rlxf.reporting.line_file import LineFile
from mindspeed_rlxf.run.directory import RunDirectory
from mindspeed_rlxf.run.store import Checkpoint, Manifest, RunStore, missing_parts
from mindspeed_rlxf.weights.state_files import content_problem

TRAINER = "trainer"
STATE, CONFIG = "state.json", "config.yaml"


def parts_of(config: RunConfig) -> list[str]:
    """Subfolders of a checkpoint: of what is trained, and of the driver."""
    return [name for role, name in SAVED_AS.items() if role in config.roles] + [TRAINER]


def whole_checkpoints(
    config: RunConfig, store: RunStore
) -> tuple[list[tuple[Checkpoint, Manifest]], list[str]]:
    """Newest first, with all files in their length; and a line for each that is damaged.

    The driver's part has been read through too, those of the roles are the workers' to read.
    """
    whole, problems = [], []
    for checkpoint in store.newest_first():
        try:
            manifest = checkpoint.read()
            missing = missing_parts(manifest, parts_of(config))
            if missing:
                raise ValueError(f"no files of {' and '.join(missing)}")
            folder = checkpoint.path / TRAINER
            found = [content_problem(folder, entry) for entry in manifest.part(TRAINER)]
            if damaged := [problem for problem in found if problem is not None]:
                raise ValueError("; ".join(f"{TRAINER}/{problem}" for problem in damaged))
        except (ValueError, OSError) as error:
            problems.append(f"{checkpoint.path} is damaged: {error}")
        else:
            whole.append((checkpoint, manifest))
    return whole, problems


def read_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """The driver's state: `iteration`, `trainer`, `positions`, `prompts_digest`."""
    state: dict[str, Any] = read_json(checkpoint.path / TRAINER / STATE)
    if type(state) is not dict:
        raise ValueError(f"{checkpoint.path / TRAINER / STATE} is not what was written")
    return state


def best_iterations(store: RunStore) -> list[int]:
    """The checkpoint with the highest validation score, the first of several; none without one."""
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


def reached(config: RunConfig, directory: RunDirectory) -> int:
    """Iteration of the newest whole checkpoint that the command would go on from; 0 = none."""
    if not directory.is_used or config.training.new_run:
        return 0
    whole, _ = whole_checkpoints(config, RunStore(directory.checkpoints))
    return whole[0][0].iteration if whole else 0


def newest_state(config: RunConfig, directory: RunDirectory) -> dict[str, Any] | None:
    """The driver's state that the command would go on from; None = it starts."""
    if not directory.is_used or config.training.new_run:
        return None
    whole, _ = whole_checkpoints(config, RunStore(directory.checkpoints))
    return read_state(whole[0][0]) if whole else None


def beyond(config: RunConfig, done: int) -> list[Problem]:
    """The problem of a run that has gone further than `train_iters`. done: see `reached`"""
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
    """`train_iters` was reached, and the weights were exported after that.

    Raises UserError where the run has gone further than `train_iters`.
    """
    done = reached(config, directory)
    if problems := beyond(config, done):
        raise UserError(problems)
    return done == config.training.train_iters == RunStore(directory.checkpoints).exported()


def digest(prompts: Sequence[Prompt], eos_token_ids: Sequence[int]) -> str:
    """Of what the run learns from: another file, another tokenizer or other stop tokens differ."""
    found = hashlib.sha256(json.dumps(sorted(eos_token_ids)).encode())
    for prompt in prompts:
        found.update(len(prompt.token_ids).to_bytes(8, "little"))
        found.update(prompt.token_ids.astype("<i8").tobytes())
        found.update(json.dumps([prompt.ground_truth, prompt.data_source]).encode())
    return found.hexdigest()


def cut_files(directory: RunDirectory, positions: dict[str, int]) -> None:
    """Leave of each file of lines what was there when the checkpoint was taken.

    Raises UserError where there is less than that.
    """
    for file in line_files(directory):
        if not file.exists():  # see `lacking` and `gone`
            continue
        try:
            file.cut(positions.get(file.path.name, 0))
        except ValueError as error:
            raise UserError(Problem("", str(error))) from None


def lacking(directory: RunDirectory, positions: dict[str, int]) -> str:
    """What the files of lines have no longer of a checkpoint's positions; empty = they have all.

    Samples that are gone altogether were cleared away by somebody: see `gone`.
    """
    cleared = gone(directory, positions)
    for file in line_files(directory):
        wanted = positions.get(file.path.name, 0)
        if file.path not in cleared and (there := file.position()) < wanted:
            return f"{file.path} has {there} bytes of the {wanted} that it had then"
    return ""


def gone(directory: RunDirectory, positions: dict[str, int]) -> list[Path]:
    """Files of samples that a checkpoint's positions tell of and that are not there."""
    return [
        path
        for path in _samples(directory)
        if positions.get(path.name, 0) and not LineFile(path).exists()
    ]


def _samples(directory: RunDirectory) -> tuple[Path, ...]:
    return directory.samples, directory.val_samples


def positions(directory: RunDirectory) -> dict[str, int]:
    """File name -> bytes of each file of lines, with its parts, at this moment; on the disk."""
    files = [file for file in line_files(directory) if file.exists()]
    for file in files:
        file.sync()
    return {file.path.name: file.position() for file in files}


def line_files(directory: RunDirectory) -> list[LineFile]:
    """Files that grow by lines as the run goes on."""
    paths = directory.metrics, *_samples(directory), directory.consumed
    return [LineFile(path) for path in paths]
