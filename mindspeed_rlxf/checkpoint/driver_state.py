"""Find the checkpoints that a run can resume from, read the driver's state, cut its files."""

import functools
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
    """Return (complete checkpoints, newest first; a line per damaged one).

    Complete: all files have their sizes, no trained role lacks files, and the driver's files have
    their hashes. The ranks of the roles hash the roles' files later. Raises StorageUnreadable.
    """
    whole, problems = [], []
    parts = [name for role, name in SAVED_AS.items() if role in config.roles] + [TRAINER]

    def read(checkpoint: Checkpoint) -> WholeCheckpoint:
        manifest, folder = checkpoint.read(), checkpoint.path / TRAINER
        if missing := [name for name in parts if not manifest.part(name)]:
            raise ValueError(f"no files of {' and '.join(missing)}")
        if damage := find_damage(folder, manifest.part(TRAINER)):
            raise ValueError("; ".join(f"{TRAINER}/{problem}" for problem in damage))
        return WholeCheckpoint(checkpoint, manifest, json.loads((folder / STATE).read_bytes()))

    for checkpoint in readable(store.newest_first):
        try:
            whole.append(readable(functools.partial(read, checkpoint)))
        except (ValueError, OSError) as error:
            problems.append(f"{checkpoint.path} is damaged: {error}")
    return whole, problems


def find_score(state: dict[str, Any], metric: str) -> float | None:
    """Return the finite validation score of `metric` in a driver's state; None without one."""
    score = state.get("score")
    if state.get("score_metric", DEFAULT_METRIC) != metric or not isinstance(score, (int, float)):
        return None
    return float(score) if abs(score) < math.inf else None


def find_resumable(
    config: RunConfig, directory: RunDirectory
) -> tuple[list[WholeCheckpoint], list[str]]:
    """Return `find_whole_checkpoints`; nothing if the command does not resume a run.

    It resumes from an older checkpoint if it finds damage when it hashes the files of the roles.
    """
    if not directory.is_used or config.training.new_run:
        return [], []
    return find_whole_checkpoints(config, RunStore(directory.checkpoints))


def no_whole_checkpoint(directory: RunDirectory, problems: Sequence[str]) -> Problem:
    return Problem(
        f"no checkpoint of {directory.path}",
        f"can be resumed from: {'; '.join(problems)}",
        remedy="put the files back, or set training.new_run=true",
    )


def check_resume(config: RunConfig, directory: RunDirectory) -> list[Problem]:
    """Return [problem] if all checkpoints are damaged, or have more iterations than `train_iters`.

    Raises StorageUnreadable.
    """
    whole, problems = find_resumable(config, directory)
    if not whole:
        return [no_whole_checkpoint(directory, problems)] if problems else []
    wanted, done = config.training.train_iters, whole[0].checkpoint.iteration
    if done <= wanted:
        return []
    return [
        Problem(
            "training.train_iters",
            f"must be at least the {done} iterations that the run in {directory.path} has done",
            wanted,
            f"use {done} or more, or training.new_run=true",
        )
    ]


def is_finished(config: RunConfig, directory: RunDirectory) -> bool:
    """Return whether the newest checkpoint is that of `train_iters`, and its weights were exported.

    Raises UserError if the run has gone further than `train_iters`.
    """
    whole, _ = find_resumable(config, directory)
    wanted, store = config.training.train_iters, RunStore(directory.checkpoints)
    if not whole or whole[0].checkpoint.iteration < wanted:
        return False
    if problems := check_resume(config, directory):
        raise UserError(problems)
    return readable(store.exported) == wanted


def hash_prompts(
    prompts: Sequence[Prompt], eos_token_ids: Sequence[int], reads_extra_info: bool = False
) -> str:
    """Return the SHA-256 (hex) of a run's prompts, in order, and of its EOS ids, in any order.

    Args:
        reads_extra_info: Also hash the other columns of the rows, which reward functions get.
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
    """Truncate each line file to its length at the checkpoint.

    Args:
        positions: Bytes by file name, else 0. Missing and shorter files stay as they are.
    """
    for file in _line_files(directory):
        if file.exists():  # removed samples stay away
            with open(file, "r+b") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.truncate(min(size, positions.get(file.name, 0)))
                os.fsync(stream.fileno())


def find_shortened_file(directory: RunDirectory, positions: dict[str, int]) -> str:
    """Return a text on the first line file that is shorter than at the checkpoint, "" for none.

    Files of samples may be: no state depends on them, and users remove them.
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
    samples = directory.samples, directory.val_samples
    return directory.metrics, directory.health, *samples, directory.consumed
