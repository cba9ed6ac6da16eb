"""Bytes and folders, for the plan and for the doctor."""

from __future__ import annotations

from pathlib import Path

GIB, MIB = 1024**3, 1024**2


def format_bytes(count: float) -> str:
    """Format bytes as GiB, or as MiB when small."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / MIB:.1f} MiB" if count else "0"


def existing_folder(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
