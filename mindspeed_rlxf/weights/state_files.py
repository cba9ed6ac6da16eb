"""Run checkpoint files: written, hashed by the writing rank, checked before use."""

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_rlxf.weights.atomic import replace_file

Entry = dict[str, Any]
"""A file in a manifest: `path` within the folder, `size` in bytes, `sha256`."""


@dataclass(frozen=True)
class Loaded:
    """Result from loading a role's state."""

    problem: str = ""  # why a rank of the role could not load it
    unreadable: str = ""  # read errors that lasted, which are no damage
    same_layout: bool = True  # the same parallel layout wrote it


READ_BYTES = 1 << 22
PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # before a read is tried again
T = TypeVar("T")
INDEX = "index.json"
MANIFEST = "manifest.json"


def patiently(read: Callable[[], T]) -> T:
    """Return `read()`; after an OSError, such as EIO or ESTALE, retry for some seconds.

    Raises the last OSError; FileNotFoundError and ValueErrors at once.
    """
    for pause in PAUSES_S:
        try:
            return read()
        except OSError as error:
            if isinstance(error, (FileNotFoundError, NotADirectoryError, ValueError)):
                raise
            time.sleep(pause)
    return read()


def attempt(step: Callable[[], None]) -> Loaded:
    """Run a loading step, patiently; return what went wrong, without raising it."""
    try:
        patiently(step)
    except (ValueError, FileNotFoundError) as error:
        return Loaded(problem=str(error))
    except OSError as error:
        return Loaded(unreadable=f"{error} on {socket.gethostname()}")
    return Loaded()


def entry_of(folder: Path, file: Path) -> Entry:
    """Fsync and hash a file; return its manifest entry, with a path relative to `folder`."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())
        while True:
            block = stream.read(READ_BYTES)
            if not block:
                break
            digest.update(block)
        size = stream.tell()
    path = file.relative_to(folder).as_posix()
    return {"path": path, "size": size, "sha256": digest.hexdigest()}


def entries_below(name: str, entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries in a subfolder, with paths relative to it."""
    head = f"{name}/"
    return [
        {**entry, "path": entry["path"].removeprefix(head)}
        for entry in entries
        if entry["path"].startswith(head)
    ]


def write_rank_index(
    folder: Path, rank: int, entries: list[Entry], tensors: dict[str, Any]
) -> None:
    """Write a rank's index, its last file in a folder: its entries, and the rows of each file."""
    write_text(_rank_index(folder, rank), json.dumps({"files": entries, "tensors": tensors}))


def has_rank_indexes(folder: Path, ranks: int) -> bool:
    """Return whether all ranks have written their files."""
    return len(list(folder.glob("index_*.json"))) == ranks


def merge_rank_indexes(folder: Path, ranks: int) -> Entry:
    """Merge the ranks' indexes into INDEX and remove them; return the entry for INDEX.

    A loading rank then opens one file to find its tensors, not one per rank.
    """
    files: list[Entry] = []
    tensors: dict[str, Any] = {}
    for rank in range(ranks):
        rank_index = json.loads(_rank_index(folder, rank).read_bytes())
        files += rank_index["files"]
        tensors |= rank_index["tensors"]
    write_text(folder / INDEX, json.dumps({"files": files, "tensors": tensors}))
    for rank in range(ranks):
        _rank_index(folder, rank).unlink()
    return entry_of(folder, folder / INDEX)


def _rank_index(folder: Path, rank: int) -> Path:
    return folder / f"index_{rank:05d}.json"


def read_index(folder: Path) -> dict[str, Any] | None:
    """Read the INDEX in a role's folder; None without one, as older versions wrote none."""
    try:
        return dict(json.loads((folder / INDEX).read_bytes()))
    except FileNotFoundError:
        return None


def role_entries(folder: Path) -> list[Entry]:
    """Return the entries for all files in a role's checkpoint folder.

    From its INDEX, else from an older version's manifest, whose hashes the driver has checked.
    """
    index = read_index(folder)
    if index is not None:
        return list(index["files"])
    try:
        tree = json.loads((folder.parent / MANIFEST).read_bytes())
    except FileNotFoundError:
        return []
    return entries_below(folder.name, tree["files"])


def find_damage(folder: Path, entries: Iterable[Entry], by_hash: bool = True) -> list[str]:
    """Return a line per file missing, with another size or, if `by_hash`, another hash."""
    problems = []
    for entry in entries:
        path = entry["path"]
        try:  # `Path.is_file` would take a read error for a missing file
            size = (folder / path).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            problems.append(f"{path} is missing")
            continue
        if size != entry["size"]:
            problems.append(f"{path} has {size} bytes, not {entry['size']}")
        elif by_hash and entry_of(folder, folder / path)["sha256"] != entry["sha256"]:
            problems.append(f"{path} differs from what was written (sha256)")
    return problems


def under(folder: str, entries: Iterable[Entry]) -> list[Entry]:
    """Prefix the paths in `entries` with `folder`."""
    return [{**entry, "path": f"{folder}/{entry['path']}"} for entry in entries]


def write_text(file: Path, text: str) -> None:
    """Replace a file atomically by this text, and fsync it; make its folder if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, text)
