"""Replace files atomically, and keep names that a manifest lists inside its folder."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path, PurePosixPath


def replace_file(path: Path, content: str | bytes) -> None:
    """Write `content` to the file atomically and flush it to disk.

    After a crash the file has either its old or its new content.
    """
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(hidden, "xb") as stream:
            stream.write(content.encode("utf-8") if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(hidden, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(hidden)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries (new, renamed and deleted files) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_plain_path(name: object) -> bool:
    """Return whether a name read from a file is a relative path in normal form without `..`."""
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name:
        return False
    path = PurePosixPath(name)
    inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    return inside and path.as_posix() == name


def locate_inside(folder: Path, name: str, manifest: str) -> Path:
    """Return folder / name, for a file `name` that a manifest in `folder` lists.

    Raises:
        ValueError: for an absolute path and one with `..`.
    """
    if not is_plain_path(name):
        raise ValueError(
            f"{folder / manifest} must name files of its own folder, not {name[:200]!r}; "
            "do not use this folder, or copy it again"
        )
    return folder / name
