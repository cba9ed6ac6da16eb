"""Files that a manifest or an index names stay in its folder."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rlxf.files.safe import is_plain_path, leading_out, leaves

__all__ = ["inside", "leaves"]


def inside(folder: Path, name: str, manifest: str) -> Path:
    """The file of that name. manifest: what names it, for the message.

    Errors: ValueError for an absolute path, one with `..`, and a link that leads out of the folder.
    """
    if not is_plain_path(name):
        raise ValueError(
            f"{folder / manifest} must name files of its own folder, not {name[:200]!r}; "
            "do not use this folder, or copy it again"
        )
    if leaves(folder, folder / name):
        raise ValueError(leading_out(folder / name))
    return folder / name
