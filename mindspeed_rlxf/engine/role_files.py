"""Write and check the files of a role's training state, whatever engine they are from."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.engine.collective_errors import gather_all
from mindspeed_rlxf.weights.atomic import sync_folder
from mindspeed_rlxf.weights.state_files import (
    Loaded,
    attempt,
    entry_of,
    find_damage,
    role_entries,
    write_rank_index,
    write_text,
)

STATE = "state.json"
RANDOM_FILE = "random/rank_{:05d}.json"
IndexRows = dict[str, Any]
"""File -> rows of its tensors in the index."""


def make_writer() -> ThreadPoolExecutor:
    """Return a thread that writes checkpoints, on this process's device."""
    return ThreadPoolExecutor(1, "checkpoint", initializer=device.select_in_thread)


WRITER = make_writer()
"""One thread for all roles of the process, which share a disk."""


def write_files(
    folder: Path,
    rank: int,
    write: Callable[[], tuple[list[Path], IndexRows]],
    texts: Mapping[str, str],
    describe: Callable[[Path], list[Path]],
) -> float:
    """Write a rank's files, then its index; return the seconds taken.

    Makes the folder, and fsyncs it. Runs in the thread WRITER, in the same order on all ranks.

    Args:
        folder: The role's folder.
        rank: This rank.
        write: Writes the tensors; returns the files with index rows.
        texts: Contents by path within the folder.
        describe: Writes the model's side files, on rank 0; returns them.
    """
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    files, rows = write()
    for name, text in texts.items():
        write_text(folder / name, text)
    files = [*files, *(folder / name for name in texts)]
    if rank == 0:
        files += describe(folder)
    entries = [entry_of(folder, file) for file in files]
    sync_folder(folder)
    write_rank_index(folder, rank, entries, rows)
    return time.monotonic() - started


def load_checked(folder: Path, load_share: Callable[[], bool]) -> Loaded:
    """Check and load a role's training state; a collective over its ranks.

    Each rank first reads and hashes its part of all files; then `load_share` loads its tensors,
    without collectives, and returns whether the same layout wrote them. If the folder has damage,
    another model or no state, or cannot be read for some seconds, all ranks return that instead of
    raising; the state may then be loaded in part.
    """

    def check() -> None:  # each rank hashes a part of all files
        files = role_entries(folder)[dist.get_rank() :: dist.get_world_size()]
        damage = find_damage(folder, files)
        if damage:
            raise ValueError("; ".join(f"{folder.name}/{problem}" for problem in damage))

    checked = _agree(check)
    if checked.problem or checked.unreadable:
        return checked
    same: list[bool] = []
    loaded = _agree(lambda: same.append(load_share()))
    return replace(loaded, same_layout=same[-1]) if loaded == Loaded() else loaded


def _agree(step: Callable[[], None]) -> Loaded:
    results = gather_all([attempt(step)])
    problems = dict.fromkeys(result.problem for result in results if result.problem)
    unreadable = dict.fromkeys(result.unreadable for result in results if result.unreadable)
    return Loaded("; ".join(problems), "; ".join(unreadable))
