"""Files that a manifest or an index names stay in its folder."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

HUB_SNAPSHOTS, HUB_BLOBS = "snapshots", "blobs"


def inside(folder: Path, name: str, manifest: str) -> Path:
    """The file of that name. manifest: what names it, for the message.

    Errors: ValueError for an absolute path, one with `..`, and a link that leads out of the folder.
    Links of Hugging Face's cache, from its snapshots to its blobs, are as good as the file.
    """
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ValueError(
            f"{folder / manifest} must name files of its own folder, not {name[:200]!r}; "
            "do not use this folder, or copy it again"
        )
    if leaves(folder, folder / path):
        raise ValueError(
            f"{folder / path} must not lead out of its folder, it is a link to "
            f"{(folder / path).resolve()}; give the folder that holds the file, or copy it"
        )
    return folder / path


def leaves(folder: Path, path: Path) -> bool:
    """Whether links take `path`, which is below `folder`, out of it."""
    root, target = folder.resolve(), path.resolve()
    in_hub = root.parent.name == HUB_SNAPSHOTS
    return not (
        target.is_relative_to(root)
        or (in_hub and target.is_relative_to(root.parent.parent / HUB_BLOBS))
    )
