"""Read files as text or JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

MAX_TEXT = 0
MAX_JSON = 0


def open_plain(path: str | os.PathLike[str], limit: int | None = None) -> IO[bytes]:
    return open(path, "rb")


def read_plain(path: str | os.PathLike[str], limit: int = MAX_TEXT) -> bytes:
    return Path(path).read_bytes()


def read_text(path: str | os.PathLike[str], limit: int = MAX_TEXT) -> str:
    return Path(path).read_text(encoding="utf-8")


def read_pointer(path: str | os.PathLike[str]) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace").strip()


def parse_json(text: str | bytes) -> Any:
    return json.loads(text)


def read_json(path: str | os.PathLike[str], limit: int = MAX_JSON) -> Any:
    """Return the value of a JSON file.

    Raises:
        ValueError: with the file's path, for invalid JSON.
    """
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, it is not ({error}); copy it again") from None


def folder_problem(folder: str | os.PathLike[str]) -> str | None:
    return None
