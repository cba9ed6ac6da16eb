"""A folder that appears under its name when it is complete."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mindspeed_rlxf.config.errors import Problem, UserError

MARKER = ".converted.json"  # names of the files that were written to the folder beside it


@contextmanager
def new_folder(target: Path, files: Iterable[str], replace: bool) -> Iterator[Path]:
    """Yield the empty folder `TARGET.partial`; rename it to `target` after the block.

    Removes it if the block raises, and one that an interrupted call left.
    files:   names of all files that may be written to it, relative to it
    replace: an older `target` that this function made is removed at the end
    Raises UserError if `target` exists without `replace`, it or the partial folder has files that
    this function did not make, or another process writes it.
    """
    partial = target.with_name(f"{target.name}.partial")
    if _is_occupied(target):
        if not replace:
            remedy = "give another folder, or --force"
            raise UserError(Problem(f"{target}", "must not exist yet", remedy=remedy))
        _check_ours(target)
    if _is_occupied(partial):
        _check_ours(partial)
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / MARKER).open("w", encoding="utf-8") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)  # until it is closed
        json.dump(sorted(files), marker)
        marker.flush()
        try:
            yield partial
            _sync(partial)
            if replace and _is_occupied(target):
                _check_ours(target)
                shutil.rmtree(target)
            os.rename(partial, target)  # fails where a folder of that name has appeared
            _sync(target.parent, deep=False)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _is_occupied(folder: Path) -> bool:
    """Whether something is there that is no empty folder."""
    return os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir()))


def _check_ours(folder: Path) -> None:
    """Raise UserError unless all files below the folder are ours and nobody writes it."""
    remedy = "give another folder, or remove it yourself"
    try:
        with (folder / MARKER).open("r+", encoding="utf-8") as marker:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = {MARKER, *json.load(marker)}
    except BlockingIOError:
        rule, remedy = "is written by another process", "wait for it, or give another folder"
        raise UserError(Problem(f"{folder}", rule, remedy=remedy)) from None
    except (OSError, ValueError, TypeError):
        raise UserError(Problem(f"{folder}", "was not written by convert", remedy=remedy)) from None
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    if folder.is_symlink() or (others := sorted(found - ours)):
        shown = "it is a link" if folder.is_symlink() else ", ".join(others[:5])
        rule = f"has files that convert did not write: {shown}"
        raise UserError(Problem(f"{folder}", rule, remedy=remedy))


def _sync(folder: Path, deep: bool = True) -> None:
    """Fsync a folder, with `deep` all files and folders below it too."""
    for path in [*(folder.rglob("*") if deep else ()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
