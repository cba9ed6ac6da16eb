"""Format byte counts, and find existing folders."""

from pathlib import Path

GIB = 1024**3
MIB = 1024**2


def format_bytes(count: float) -> str:
    """Format bytes as GiB, below one GiB as MiB, with one decimal; 0 as "0"."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / MIB:.1f} MiB" if count else "0"


def existing_folder(path: Path) -> Path:
    """Return `path` if it exists, else its nearest existing parent."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
