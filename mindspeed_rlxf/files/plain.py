"""Read files that others wrote: regular files only, up to a size, and JSON up to a depth.

A path may lead to a FIFO, which blocks the reader, to a device, which has no end, or to a sparse
file of terabytes. Links are followed here; `safe.open_inside` refuses those that leave a folder.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

MAX_TEXT = 64 * 2**20  # bytes of a configuration or a sidecar
MAX_JSON = 32 * 2**20  # bytes of an index or a manifest; in memory it may be 20 times as much
MAX_POINTER = 4096  # bytes of a file that holds one number or one name
MAX_DEPTH = 100  # levels of nested lists and objects
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
OTHER_KIND = "of another kind"
DEPTH_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
NO_BRACKETS = bytes(set(range(256)) - set(DEPTH_STEPS))
JSON_STRING = re.compile(r'"(?:[^"\\]+|\\.)*"?', re.DOTALL)


class NotPlainError(OSError, ValueError):
    """The path leads to something other than a regular file, or to a file that is too large.

    It is also a ValueError, because the content is wrong, not the access to it.
    """

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def require_plain(path: str | os.PathLike[str], status: os.stat_result) -> None:
    """Raise NotPlainError unless `status` is that of a regular file. path: for the message"""
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        found = f"it is {KINDS.get(kind, OTHER_KIND)}, not a plain file"
        raise NotPlainError(0, found, os.fspath(path))


def open_plain(path: str | os.PathLike[str], limit: int | None = None) -> IO[bytes]:
    """Open a regular file for reading bytes; links are followed. Never blocks.

    limit: largest size in bytes; None = any size
    Errors: OSError; of these NotPlainError for other kinds of files, and for larger files.
    """
    require_plain(path, os.stat(path))  # before opening, because opening may act on a device
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        require_plain(path, status)
        if limit is not None and status.st_size > limit:
            found = f"it has {status.st_size} bytes, more than {limit}"
            raise NotPlainError(0, found, os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: str | os.PathLike[str], limit: int = MAX_TEXT) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Errors as in `open_plain`."""
    with open_plain(path, limit) as stream:
        return stream.read(limit)


def read_text(path: str | os.PathLike[str], limit: int = MAX_TEXT) -> str:
    """Return the text of a regular UTF-8 file of at most `limit` bytes.

    Ends of lines become newlines. Errors: as in `open_plain`, and UnicodeDecodeError.
    """
    with open_plain(path, limit) as stream:
        return io.TextIOWrapper(stream, encoding="utf-8").read(limit)


def read_pointer(path: str | os.PathLike[str]) -> str:
    """Return the text of a file of at most MAX_POINTER bytes, without surrounding spaces.

    Invalid UTF-8 is replaced. Errors: as in `open_plain`.
    """
    return read_plain(path, MAX_POINTER).decode("utf-8", "replace").strip()


def parse_json(text: str | bytes, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value of JSON text that nests at most `max_depth` lists and objects.

    Errors: ValueError for deeper or invalid JSON, and bytes that are not UTF-8.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        if text.count("[") + text.count("{") <= max_depth or not _nests_deeper(text, max_depth):
            return json.loads(text)
    except RecursionError:
        pass
    raise ValueError(f"lists and objects nest more than {max_depth} deep")


def read_json(path: str | os.PathLike[str], limit: int = MAX_JSON) -> Any:
    """Return the value of a JSON file of at most `limit` bytes.

    Errors: as in `open_plain`, and ValueError with the file's path for invalid JSON.
    """
    try:
        return parse_json(read_plain(path, limit))
    except NotPlainError:
        raise
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, it is not ({error}); copy it again") from None


def folder_problem(folder: str | os.PathLike[str]) -> str | None:
    """Return text about the first entry of a folder that is a FIFO, socket, device or link to one.

    Entries are sorted by name; subfolders are not searched. None if there is none. Regular files,
    folders and dangling links are fine.
    """
    for entry in sorted(Path(folder).iterdir()):
        if entry.exists() and not entry.is_dir():
            kind = stat.S_IFMT(entry.stat().st_mode)
            if kind != stat.S_IFREG:
                return f"{entry.name} must be a plain file, it is {KINDS.get(kind, OTHER_KIND)}"
    return None


def _nests_deeper(text: str, limit: int) -> bool:
    outside_strings = JSON_STRING.sub("", text).encode("utf-8", "surrogatepass")
    brackets = outside_strings.translate(None, NO_BRACKETS)
    return any(depth > limit for depth in accumulate(map(DEPTH_STEPS.__getitem__, brackets)))
