"""Files of a run checkpoint: written to the disk, hashed by who wrote them, checked before use."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rlxf.files.safe import (
    is_plain_path,
    make_private_folder,
    open_file,
    replace_file,
)

Entry = dict[str, Any]
"""A file in a manifest: `path` within the folder, `size` in bytes, `sha256`; `host` where only that
one keeps it."""


@dataclass(frozen=True)
class Written:
    """Files of a role, and how long the rank took that wrote longest, seconds."""

    files: list[Entry]
    seconds: float


HOST = "host"
READ_BYTES = 1 << 22


def entry_of(folder: Path, file: Path) -> Entry:
    """The file's line in a manifest; what it says is on the disk then."""
    digest = hashlib.sha256()
    with open_file(file, "rb") as stream:
        os.fsync(stream.fileno())
        while data := stream.read(READ_BYTES):
            digest.update(data)
        size = stream.tell()
    path = file.relative_to(folder).as_posix()
    return {"path": path, "size": size, "sha256": digest.hexdigest()}


def under(folder: str, entries: Iterable[Entry]) -> list[Entry]:
    """The same files, seen from the folder above."""
    return [{**entry, "path": f"{folder}/{entry['path']}"} for entry in entries]


def without_host(entry: Entry) -> Entry:
    """The file itself, wherever it is kept."""
    return {key: value for key, value in entry.items() if key != HOST}


def leaves_folder(path: Any) -> bool:
    """Whether a path of a manifest is no plain path inside its folder."""
    return not is_plain_path(path)


def size_problem(folder: Path, entry: Entry) -> str | None:
    """What can be told without reading: the file is missing, a link, or of another length."""
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
    """The same, or the file is not what was written."""
    try:
        problem = size_problem(folder, entry)
        if problem is None and entry_of(folder, folder / entry["path"]) != without_host(entry):
            problem = f"{entry['path']} is not what was written (sha256)"
    except OSError as error:
        return f"{entry['path']} cannot be read ({error.strerror})"
    return problem


def write_text(file: Path, text: str, mode: int | None = None) -> None:
    """The file has the whole text, on the disk, or what it had before.

    mode: of a file of the configuration, whose folder then is for such files
    """
    if mode is None:
        file.parent.mkdir(parents=True, exist_ok=True)
    else:
        make_private_folder(file.parent, mode)
    replace_file(file, text, mode)
