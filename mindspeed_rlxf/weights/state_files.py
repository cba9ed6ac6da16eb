"""Files of a run checkpoint: written, hashed by the rank that wrote them, checked before use."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rlxf.files.plain import read_json
from mindspeed_rlxf.files.safe import (
    make_private_folder,
    open_file,
    replace_file,
)

Entry = dict[str, Any]
"""A file in a manifest: `path` within the folder, `size` in bytes, `sha256`."""


@dataclass(frozen=True)
class Written:
    """Files that a role wrote. seconds: time that its slowest rank needed"""

    files: list[Entry]
    seconds: float


@dataclass(frozen=True)
class Loaded:
    """Result of loading a role's state from a checkpoint.

    problem:     why a rank of the role could not load it; "" = all ranks could
    same_layout: whether the same parallel layout wrote it
    """

    problem: str = ""
    same_layout: bool = True


READ_BYTES = 1 << 22
MANIFEST = "manifest.json"


def entry_of(folder: Path, file: Path) -> Entry:
    """Fsync and hash a file; return its manifest entry: path relative to `folder`, size, sha256."""
    digest = hashlib.sha256()
    with open_file(file, "rb") as stream:
        os.fsync(stream.fileno())
        while data := stream.read(READ_BYTES):
            digest.update(data)
        size = stream.tell()
    path = file.relative_to(folder).as_posix()
    return {"path": path, "size": size, "sha256": digest.hexdigest()}


def entries_below(name: str, entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries of one subfolder, with paths relative to it; [] for none."""
    head = f"{name}/"
    return [
        {**entry, "path": entry["path"].removeprefix(head)}
        for entry in entries
        if entry["path"].startswith(head)
    ]


def role_entries(folder: Path) -> list[Entry]:
    """Return the manifest entries of a role's folder in a checkpoint, with paths relative to it.

    Raises OSError, ValueError; the driver has checked the manifest's hash.
    """
    return entries_below(folder.name, read_json(folder.parent / MANIFEST)["files"])


def find_damage(folder: Path, entries: Iterable[Entry]) -> list[str]:
    """Read and hash all files of `entries`; return a line for each that differs, [] for none."""
    problems = (content_problem(folder, entry) for entry in entries)
    return [problem for problem in problems if problem is not None]


def under(folder: str, entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries with `folder` put before their paths."""
    return [{**entry, "path": f"{folder}/{entry['path']}"} for entry in entries]


def size_problem(folder: Path, entry: Entry) -> str | None:
    """Return how a file differs from its entry: a link, missing (or no file), or of another size.

    None if it does not. Reads no content.
    """
    file = folder / entry["path"]
    if file.is_symlink():
        return f"{entry['path']} is a link"
    if not file.is_file():
        return f"{entry['path']} is missing"
    size = file.stat().st_size
    if size != entry["size"]:
        return f"{entry['path']} has {size} bytes, not {entry['size']}"
    return None


def content_problem(folder: Path, entry: Entry) -> str | None:
    """Return how a file differs from its entry: a link, missing, unreadable, other size or hash.

    None if it does not. Reads the whole file, unless the size differs.
    """
    try:
        problem = size_problem(folder, entry)
        if (
            problem is None
            and entry_of(folder, folder / entry["path"])["sha256"] != entry["sha256"]
        ):
            problem = f"{entry['path']} differs from what was written (sha256)"
    except OSError as error:
        return f"{entry['path']} cannot be read ({error.strerror})"
    return problem


def write_text(file: Path, text: str, mode: int | None = None) -> None:
    """Replace a file atomically by this text, and fsync it; make its folder if needed.

    mode: permission bits of the file; its folder gets those that fit them (`folder_mode`), if this
          user owns it. None = both by umask
    """
    if mode is None:
        file.parent.mkdir(parents=True, exist_ok=True)
    else:
        make_private_folder(file.parent, mode)
    replace_file(file, text, mode)
