"""Which build of this package a process runs: on a cluster every node has its own installation."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import mindspeed_rlxf


@functools.cache
def build() -> str:
    """Version and hash of all sources, equal where the code is: `0.1.0, sources 3f2a91c07d4e`."""
    return f"{mindspeed_rlxf.__version__}, sources {digest(Path(mindspeed_rlxf.__file__).parent)}"


def digest(folder: Path) -> str:
    """Hash of names and contents of the Python files below `folder`, 12 hexadecimal digits."""
    hashed = hashlib.sha256()
    for file in sorted(folder.rglob("*.py"), key=lambda file: file.relative_to(folder).as_posix()):
        hashed.update(file.relative_to(folder).as_posix().encode() + b"\0")
        hashed.update(hashlib.sha256(file.read_bytes()).digest())
    return hashed.hexdigest()[:12]
