"""Find the checkpoints that a run can resume from, read the driver's state, cut its files."""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rlxf.checkpoint.directory import RunDirectory, readable
from mindspeed_rlxf.checkpoint.store import Checkpoint, Manifest, RunStore
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.schema import SAVED_AS, RunConfig
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.weights.state_files import find_damage

TRAINER = "trainer"
DEFAULT_METRIC = "score"  # of checkpoints that do not name their metric
STATE, CONFIG = "state.json", "config.yaml"


@dataclass(frozen=True)
class WholeCheckpoint:
    """A checkpoint that `find_whole_checkpoints` accepts.

    state: the driver's state, a dict with
        iteration
        trainer:             result of `PpoTrainer.state_dict`
        positions:           file name -> bytes of each line file (`line_positions`)
        prompts_digest:      result of `hash_prompts`
        score, score_metric: validation score of this iteration, None = not validated; its metric
    """

    checkpoint: Checkpoint
    manifest: Manifest
    state: dict[str, Any]


def find_whole_checkpoints(
    config: RunConfig, store: RunStore
) -> tuple[list[WholeCheckpoint], list[str]]:
    """Return (whole checkpoints, newest first; a line per damaged one).

    Whole: all files have their sizes, no trained role lacks files, and the driver's files have
    their hashes. The ranks of the roles hash the roles' files later. Raises StorageUnreadable.
    """
    whole, problems = [], []
    for checkpoint in readable(store.newest_first):
        try:
            whole.append(readable(lambda: _read_whole(config, checkpoint)))  # noqa: B023
        except (ValueError, OSError) as error:
            problems.append(f"{checkpoint.path} is damaged: {error}")
    return whole, problems


def _read_whole(config: RunConfig, checkpoint: Checkpoint) -> WholeCheckpoint:
    """Read a checkpoint as `find_whole_checkpoints` does. Raises ValueError for damage, OSError."""
    manifest = checkpoint.read()
    parts = [name for role, name in SAVED_AS.items() if role in config.roles] + [TRAINER]
    if missing := [name for name in parts if not manifest.part(name)]:
        raise ValueError(f"no files of {' and '.join(missing)}")
    if damage := find_damage(checkpoint.path / TRAINER, manifest.part(TRAINER)):
        raise ValueError("; ".join(f"{TRAINER}/{problem}" for problem in damage))
    return WholeCheckpoint(checkpoint, manifest, read_state(checkpoint))


def read_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the driver's state (`WholeCheckpoint.state`). Raises OSError, ValueError."""
    return dict(json.loads((checkpoint.path / TRAINER / STATE).read_bytes()))


def find_score(state: dict[str, Any], metric: str) -> float | None:
    """Return the validation score in a driver's state; None if it has none, or not a finite one.

    metric: `validation.best_metric`; scores of another metric do not count
    """
    score = state.get("score")
    if state.get("score_metric", DEFAULT_METRIC) != metric or not isinstance(score, (int, float)):
        return None
    return float(score) if abs(score) < math.inf else None


def find_newest_checkpoint(config: RunConfig, directory: RunDirectory) -> WholeCheckpoint | None:
    """Return the newest whole checkpoint (`find_whole_checkpoints`); None if there is none.

    None too with `training.new_run`, and in a folder without a run. The command resumes from the
    checkpoint, or from an older one if it finds damage when it hashes the files of the roles.
    """
    if not directory.is_used or config.training.new_run:
        return None
    whole, _ = find_whole_checkpoints(config, RunStore(directory.checkpoints))
    return whole[0] if whole else None


def check_checkpoints(config: RunConfig, directory: RunDirectory) -> list[Problem]:
    """Return [problem] if the run has checkpoints and all are damaged; [] otherwise.

    [] too with `training.new_run`, which does not resume.
    """
    if not directory.is_used or config.training.new_run:
        return []
    whole, problems = find_whole_checkpoints(config, RunStore(directory.checkpoints))
    return [] if whole or not problems else [no_whole_checkpoint(directory, problems)]


def no_whole_checkpoint(directory: RunDirectory, problems: Sequence[str]) -> Problem:
    """Make the problem of a run whose checkpoints are all damaged.

    problems: a line for each checkpoint
    """
    return Problem(
        f"no checkpoint of {directory.path}",
        f"can be resumed from: {'; '.join(problems)}",
        remedy="put the files back, or set training.new_run=true",
    )


def check_train_iters(config: RunConfig, newest: WholeCheckpoint | None) -> list[Problem]:
    """Return [problem] if the run has done more iterations than `train_iters`; [] otherwise.

    newest: checkpoint that the command would resume from; None = no checkpoint, no problem
    """
    wanted = config.training.train_iters
    if newest is None or newest.checkpoint.iteration <= wanted:
        return []
    done = newest.checkpoint.iteration
    folder = newest.checkpoint.path.parents[1]
    return [
        Problem(
            "training.train_iters",
            f"must be at least the {done} iterations that the run in {folder} has done",
            wanted,
            f"use {done} or more, or training.new_run=true",
        )
    ]


def is_finished(config: RunConfig, directory: RunDirectory) -> bool:
    """Return whether the newest checkpoint is that of `train_iters`, and its weights were exported.

    Raises UserError where the run has gone further than `train_iters`.
    """
    newest = find_newest_checkpoint(config, directory)
    if problems := check_train_iters(config, newest):
        raise UserError(problems)
    wanted, store = config.training.train_iters, RunStore(directory.checkpoints)
    return (
        newest is not None
        and newest.checkpoint.iteration == wanted
        and readable(store.exported) == wanted
    )


def hash_prompts(
    prompts: Sequence[Prompt], eos_token_ids: Sequence[int], reads_extra_info: bool = False
) -> str:
    """Return the SHA-256 (hex) of a run's prompts, in order, and of its EOS ids, in any order.

    Of a prompt: token ids, ground truth and data source.
    reads_extra_info: also hash the other columns of the rows, which reward functions get
    """
    found = hashlib.sha256(json.dumps(sorted(eos_token_ids)).encode())
    for prompt in prompts:
        found.update(len(prompt.token_ids).to_bytes(8, "little"))
        found.update(prompt.token_ids.astype("<i8").tobytes())
        labels: list[Any] = [prompt.ground_truth, prompt.data_source]
        if reads_extra_info and prompt.extra_info:
            labels.append(prompt.extra_info)
        found.update(json.dumps(labels, sort_keys=True).encode())
    return found.hexdigest()


def cut_files(directory: RunDirectory, positions: dict[str, int]) -> None:
    """Truncate each line file (metrics, health, samples, consumed) to its length at the checkpoint.

    positions: file name -> bytes; files that are not in it get 0. Missing and shorter
               files stay as they are.
    """
    for file in _line_files(directory):
        if file.exists():  # removed samples stay away
            with open(file, "r+b") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.truncate(min(size, positions.get(file.name, 0)))
                os.fsync(stream.fileno())


def find_shortened_file(directory: RunDirectory, positions: dict[str, int]) -> str:
    """Return a text on the first line file that is shorter than at the checkpoint.

    "" if there is none. Files of samples may be: no state depends on them, and users remove them.
    positions: file name -> bytes at the checkpoint; 0 for files that are not in it
    """
    for file in (directory.metrics, directory.health, directory.consumed):
        wanted = positions.get(file.name, 0)
        try:
            there = readable(file.stat).st_size
        except FileNotFoundError:
            there = 0
        if there < wanted:
            return f"{file} has {there} bytes, the checkpoint counts {wanted}"
    return ""


def line_positions(directory: RunDirectory) -> dict[str, int]:
    """Fsync each line file; return file name -> bytes. Missing files are left out."""
    positions = {}
    for file in _line_files(directory):
        if file.exists():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
                positions[file.name] = stream.seek(0, os.SEEK_END)
    return positions


def _line_files(directory: RunDirectory) -> tuple[Path, ...]:
    """Return the files of the driver to which the run appends lines, whether they exist or not.

    They are those of metrics, health, samples, validation samples and consumed prompts.
    """
    samples = directory.samples, directory.val_samples
    return directory.metrics, directory.health, *samples, directory.consumed
