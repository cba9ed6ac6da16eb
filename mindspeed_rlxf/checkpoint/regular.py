"""Opening what a stranger may have put in the place of a file: a pipe, a device, a JSON bomb."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON = 32 << 20  # bytes; in memory it may be 20 times as much


def open_regular(path: Path) -> BinaryIO:
    """Open for reading, without waiting. Errors: OSError; ValueError for what is no file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(
            f"{path} must be a file, it is a pipe, a device or a folder; copy it again"
        )
    return os.fdopen(descriptor, "rb")


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
        return json.loads(data)
    except RecursionError:
        raise ValueError(f"{path} has too many values inside each other; copy it again") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); copy it again") from None
