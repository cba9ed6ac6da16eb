"""Files of checkpoints, as `files.plain` reads them, with errors that name the file."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from mindspeed_rlxf.files import plain as plain_files

MAX_JSON = 32 << 20  # bytes; in memory it may be 20 times as much


def open_regular(path: Path) -> IO[bytes]:
    """Open for reading, without waiting. Errors: OSError; ValueError for what is no file."""
    try:
        return plain_files.open_plain(path)
    except (plain_files.NotPlainError, IsADirectoryError):
        raise ValueError(
            f"{path} must be a file, it is a pipe, a device or a folder; copy it again"
        ) from None


def read_json(path: Path, limit: int = MAX_JSON) -> Any:
    """Errors: OSError; ValueError where it is no file, no JSON, or above the limits."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} has more than {limit} bytes; copy it again")
    return parse_json(data, path)


def parse_json(data: bytes, path: Path) -> Any:
    """As `read_json`, of a part of the file."""
    try:
        return plain_files.parse_json(data)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); copy it again") from None
