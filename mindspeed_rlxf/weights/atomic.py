"""Replace files atomically and flush folders to disk."""

import os
import secrets
from pathlib import Path


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
        hidden.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries (new, renamed and deleted files) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
