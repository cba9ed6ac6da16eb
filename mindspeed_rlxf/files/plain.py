"""Open files that others wrote: plain ones only, up to a size, with bounds on what JSON may nest.

A name may lead to a FIFO, which blocks who opens it, to a device, which has no end, or to a sparse
file of terabytes. Everything that reads a file of a data set, a model or a run goes through here.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import IO, Any, NoReturn

MAX_TEXT = 64 * 2**20  # bytes of a configuration, an index, a manifest
MAX_POINTER = 4096  # bytes of a file that holds one number or one name
MAX_DEPTH = 100  # lists and objects inside each other
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class NotPlainError(OSError):
    """Something that is no plain file, or too large a one, stands under the name."""

    def __init__(self, path: str | os.PathLike[str], found: str) -> None:
        super().__init__(0, found, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def plain_problem(path: str | os.PathLike[str]) -> str | None:
    """What stands there in place of a plain file; None for one, and where there is nothing."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except OSError:
        return None
    return None if kind == stat.S_IFREG else f"it is {KINDS.get(kind, 'no file')}, not a plain file"


def open_plain(path: str | os.PathLike[str], limit: int | None = None) -> IO[bytes]:
    """A plain file for reading, links followed.

    limit: bytes that it may have; None = any number
    Raises OSError: NotPlainError without waiting for a FIFO, a device or a file over the limit.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if found := plain_problem(path):  # first, as opening a device may do something to it
        raise NotPlainError(path, found)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise NotPlainError(path, "it is not a plain file")
        if limit is not None and about.st_size > limit:
            raise NotPlainError(path, f"it has {about.st_size} bytes, more than {limit}")
    except BaseException:
        os.close(handle)
        raise
    return io.BufferedReader(io.FileIO(handle))


def read_plain(path: str | os.PathLike[str], limit: int = MAX_TEXT) -> bytes:
    """The whole file. Raises OSError as `open_plain`; a file that grows meanwhile is cut."""
    with open_plain(path, limit) as stream:
        return stream.read(limit)


def read_text(path: str | os.PathLike[str], limit: int = MAX_TEXT) -> str:
    """The whole file as UTF-8. Raises OSError as `open_plain`, UnicodeDecodeError."""
    with open_plain(path, limit) as stream:
        return io.TextIOWrapper(stream, encoding="utf-8").read(limit)


def read_pointer(path: str | os.PathLike[str]) -> str:
    """The one word of a small file; what is no UTF-8 is replaced. Raises OSError."""
    return read_plain(path, MAX_POINTER).decode("utf-8", "replace").strip()


def parse_json(text: str | bytes, max_depth: int = MAX_DEPTH) -> Any:
    """JSON that nests at most `max_depth` deep: what walks over it later does not recurse without
    end. Raises ValueError."""
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    if text.count("[") + text.count("{") > max_depth and _nests_deeper(text, max_depth):
        _refuse(f"lists and objects nest more than {max_depth} deep")
    try:
        return json.loads(text)
    except RecursionError:
        _refuse("lists and objects nest too deep")


def read_json(path: str | os.PathLike[str], limit: int = MAX_TEXT) -> Any:
    """Raises OSError as `open_plain`, ValueError."""
    return parse_json(read_text(path, limit))


def folder_problem(folder: str | os.PathLike[str]) -> str | None:
    """The first entry of a folder that a library must not open: no plain file, and no folder."""
    for entry in sorted(Path(folder).iterdir()):
        found = plain_problem(entry)
        if found and not entry.is_dir():
            return f"{entry.name} must be a plain file, {found.partition(',')[0]}"
    return None


def _refuse(rule: str) -> NoReturn:
    raise ValueError(rule) from None


def _nests_deeper(text: str, limit: int) -> bool:
    """First by brackets alone, which is quick; those inside strings are told apart where needed."""
    brackets = text.encode("utf-8", "surrogatepass").translate(None, NO_BRACKETS)
    for _ in range(limit):
        shorter = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(shorter) in (0, len(brackets)):
            return bool(shorter) and _exceeds(text, limit)
        brackets = shorter
    return _exceeds(text, limit)


def _exceeds(text: str, limit: int) -> bool:
    depth = 0
    for part in text.replace("\\\\", "").replace('\\"', "").split('"')[::2]:  # outside strings
        for sign in part:
            if sign in "[{":
                depth += 1
                if depth > limit:
                    return True
            elif sign in "]}":
                depth -= 1
    return False
