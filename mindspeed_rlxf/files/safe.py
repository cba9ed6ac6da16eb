"""Open, create and replace files in folders where others may have put links, pipes or other files.

No function opens a file through a link in the last component of its path, except `open_inside` and
`read_inside`, which follow links that stay in the folder. None blocks on a pipe.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from pathlib import Path, PurePosixPath
from typing import IO, Any

from mindspeed_rlxf.files.plain import MAX_TEXT, require_plain

PRIVATE = 0o600
"""Mode of files with configuration, logs, metrics or samples."""

HUB_SNAPSHOTS, HUB_BLOBS = "snapshots", "blobs"
SUFFIX = ".tmp"  # of files that are renamed once they are whole
FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # without waiting for a pipe
HOW = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "a+": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    "w": os.O_WRONLY | os.O_CREAT,  # truncated once it is known to be a regular file
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}


def folder_mode(file_mode: int) -> int:
    """Return the mode of a folder for files of `file_mode`: whoever may read may also enter.

    0640 -> 0750
    """
    return file_mode | (file_mode & 0o444) >> 2


def mode_within(folder: Path) -> int:
    """Return the mode for files in `folder`: the read and write bits of the folder's mode.

    It reverses `folder_mode`. PRIVATE where the folder does not exist or cannot be looked up.
    """
    try:
        return stat.S_IMODE(folder.stat().st_mode) & 0o666
    except OSError:
        return PRIVATE


def make_private_folder(folder: Path, file_mode: int = PRIVATE) -> None:
    """Create a folder for files of `file_mode`, with its parents; a folder that exists is kept.

    Sets the folder's mode by `folder_mode` if this user owns it. New parents have the default mode.
    Errors: OSError, also where the path is a link or a file.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if folder.is_symlink() or not folder.is_dir():
            raise _refused(folder, "is a link or a file, not a folder") from None
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _set_mode(descriptor, folder_mode(file_mode))
    finally:
        os.close(descriptor)


def open_file(path: Path, how: str, mode: int | None = PRIVATE, **text: Any) -> IO[Any]:
    """Open a file like `open`, but refuse links, pipes and devices, and set its mode.

    how:  mode of `open`: r, r+, a, a+, w or x, each also with b
    mode: permissions, set also on an existing file of this user that is opened to write; None = as
          `open`
    text: further arguments of `open`, such as encoding
    Errors: OSError.
    """
    kind = how.replace("b", "")
    try:
        descriptor = os.open(path, HOW[kind] | FLAGS, 0o666 if mode is None else 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _refused(path, "is a link or a pipe") from None
        raise
    try:
        require_plain(path, os.fstat(descriptor))
        if mode is not None and kind != "r":
            _set_mode(descriptor, mode)
        if kind == "w":
            os.ftruncate(descriptor, 0)
        return os.fdopen(descriptor, how.replace("x", "w"), **text)
    except BaseException:
        os.close(descriptor)
        raise


def new_file(path: Path, mode: int | None = None, **text: Any) -> IO[Any]:
    """Delete the file or link at `path`, if any; create and open a new file for writing.

    mode: permissions; None = by the umask
    text: arguments of a text file, such as encoding; without any the file is binary
    Errors: OSError, also where the path is a folder.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return open_file(path, "x" if text else "xb", mode, **text)


def hidden_name(path: Path) -> Path:
    """Return an unpredictable path for a temporary file beside `path`: .NAME.RANDOM.tmp."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{SUFFIX}")


def find_hidden_files(path: Path) -> list[Path]:
    """Return the temporary files of `path`: the files beside it with names by `hidden_name(path)`.

    Killed processes leave them; those being written are included. In no order; [] without any.
    Errors: OSError where the folder cannot be read.
    """
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}{re.escape(SUFFIX)}")
    return [file for file in path.parent.iterdir() if pattern.fullmatch(file.name)]


def replace_file(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Write `content` to the file atomically and flush it to disk; a link is itself replaced.

    After a crash the file has either its old or its new content.
    mode: permissions; None = by the umask
    Errors: OSError; no temporary file is left then.
    """
    hidden = hidden_name(path)
    try:
        with open_file(hidden, "xb", mode) as stream:
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
    """Return whether a name, read from a file, is a relative path in normal form without `..`.

    Appended to a folder it stays inside. False for other types than str, "", `.`, and a name with a
    backslash or NUL.
    """
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name:
        return False
    path = PurePosixPath(name)
    inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    return inside and path.as_posix() == name


def locate_inside(folder: Path, name: str, manifest: str) -> Path:
    """Return folder / name, for a file `name` that a manifest in `folder` lists.

    manifest: name of the manifest, for the message
    Errors: ValueError for an absolute path, one with `..`, and a link that leads out of the folder.
    """
    if not is_plain_path(name):
        raise ValueError(
            f"{folder / manifest} must name files of its own folder, not {name[:200]!r}; "
            "do not use this folder, or copy it again"
        )
    if leads_outside(folder, folder / name):
        raise ValueError(outside_message(folder / name))
    return folder / name


def leads_outside(folder: Path, path: Path) -> bool:
    """Return whether `path`, which is below `folder`, is outside once its links are followed.

    In Hugging Face's cache the blobs of the same model count as inside.
    """
    target = _resolve_links(path)
    return not any(target.is_relative_to(root) for root in _roots(folder))


def open_inside(folder: Path, name: str) -> IO[bytes]:
    """Open the regular file folder / name for reading bytes; links must stay inside the folder.

    A link that is created between the check and the opening is not followed.
    Errors: ValueError for a link that leads out; OSError, with NotPlainError for no regular file.
    """
    path = folder / name
    target = _resolve_links(path)
    root = next((root for root in _roots(folder) if target.is_relative_to(root)), None)
    if root is None:
        raise ValueError(outside_message(path))
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    parts = target.relative_to(root).parts or (".",)
    for place, part in enumerate(parts, 1):
        flags = FLAGS | (os.O_DIRECTORY if place < len(parts) else 0)
        try:
            below = os.open(part, os.O_RDONLY | flags, dir_fd=descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ValueError(outside_message(path)) from None
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            os.close(descriptor)
        descriptor = below
    try:
        require_plain(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_inside(folder: Path, name: str, limit: int = MAX_TEXT) -> bytes:
    """Return the content of the file folder / name.

    Errors: as in `open_inside`; ValueError for more than `limit` bytes.
    """
    with open_inside(folder, name) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{folder / name} has more than {limit} bytes; copy it again")
    return content


def outside_message(path: Path) -> str:
    """Return the error message for a link that leads out of its folder."""
    return (
        f"{path} must not lead out of its folder, it is a link to {_resolve_links(path)}; "
        "copy the file in its place"
    )


def _roots(folder: Path) -> list[Path]:
    root = folder.resolve()
    blobs = root.parent.parent / HUB_BLOBS
    return [root, blobs] if root.parent.name == HUB_SNAPSHOTS else [root]


def _resolve_links(path: Path) -> Path:
    """Return the path with all links resolved; links in a circle stay."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return Path(os.path.realpath(path))


def _refused(path: Path, found: str) -> OSError:
    return OSError(errno.ELOOP, f"{path.name} {found}", str(path))


def _set_mode(descriptor: int, mode: int) -> None:
    """Set the permissions of an open file regardless of the umask.

    Does nothing for a file of another owner.
    """
    found = os.fstat(descriptor)
    if stat.S_IMODE(found.st_mode) != mode and found.st_uid == os.geteuid():
        os.fchmod(descriptor, mode)
