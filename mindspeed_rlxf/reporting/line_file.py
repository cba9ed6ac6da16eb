"""A file of lines that grows for weeks: its older parts are compressed, none of it gets lost.

    samples.jsonl        what is written now
    samples.jsonl.1.gz   the oldest part, then .2.gz, ...

Kill the process at any moment: every line that was there is there, once. A full file is renamed to
`samples.jsonl.N`, compressed beside it, and removed when `samples.jsonl.N.gz` is whole; what is
half done is finished by the next one who opens it.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from mindspeed_rlxf.files.safe import (
    find_hidden_files,
    hidden_name,
    open_file,
    sync_folder,
)

SIZE_BYTES = 4  # at the end of a gz file: its length uncompressed, modulo 4 GiB
LEVEL = 6  # of gzip
BLOCK = 1 << 20


class LineFile:
    """All parts of one file, as one sequence of bytes.

    limit: bytes from which on `rotate` makes a part of it; 0 = never
    """

    def __init__(self, path: Path, limit: int = 0) -> None:
        self.path, self.limit = path, limit

    def position(self) -> int:
        """Bytes of all parts together, uncompressed."""
        parts = sum(_length(part) for part in self._parts().values())
        return parts + (self.path.stat().st_size if self.path.exists() else 0)

    def sync(self) -> None:
        """What has been written outlasts a crash of the host."""
        if self.path.exists():
            with open_file(self.path, "rb") as stream:
                os.fsync(stream.fileno())

    def exists(self) -> bool:
        return self.path.exists() or bool(self._parts())

    def lines(self) -> Iterator[bytes]:
        """From the oldest one, line ends included; the last one may be cut by a kill."""
        files = [*self._parts().values(), *([self.path] if self.path.exists() else [])]
        for file in files:
            with _open(file) as stream:
                yield from stream

    def cut(self, position: int) -> None:
        """Drop what lies behind `position`, whichever part it is in.

        A process killed in here leaves at least what is to stay: the next one can cut again.
        The file keeps its inode: who appends to it goes on.
        Errors: ValueError when there is less than that.
        """
        self._finish()
        if (there := self.position()) < position:
            raise ValueError(
                f"{self.path} must have the {position} bytes that it had at the checkpoint, it has "
                f"{there}; put it back with its parts, or start a new run"
            )
        kept = position
        later: list[Path] = []
        for part in self._parts().values():
            if later or kept < _length(part):
                later.append(part)
            else:
                kept -= _length(part)
        if not later:
            if self.path.exists():
                _truncate(self.path, kept)
            return
        _truncate(self.path, 0)
        for part in reversed(later[1:]):
            part.unlink()
        self._take_back(later[0], kept)

    def rotate(self) -> bool:
        """Make a part of a file that is full; returns whether it did.

        Whoever has it open for appending has to open it again.
        """
        if not self.limit or not self.path.exists() or self.path.stat().st_size < self.limit:
            return False
        self._finish()
        number = max(self._parts(), default=0) + 1
        self.path.rename(self._part(number))
        sync_folder(self.path.parent)
        self._finish()
        return True

    def _parts(self) -> dict[int, Path]:
        """By number, from the oldest; the compressed one where there are both."""
        pattern = re.compile(re.escape(self.path.name) + r"\.(\d+)(\.gz)?")
        found = {}
        for file in sorted(self.path.parent.glob(self.path.name + ".*")):  # .N before .N.gz
            if match := pattern.fullmatch(file.name):
                found[int(match[1])] = file
        return dict(sorted(found.items()))

    def _part(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _finish(self) -> None:
        """Compress parts that are not yet, and remove what has been compressed."""
        for number, part in self._parts().items():
            plain = self._part(number)
            if part == plain:
                _compress(plain)
            plain.unlink(missing_ok=True)

    def _take_back(self, part: Path, kept: int) -> None:
        """The first bytes of a part become the file."""
        with _open(part) as source, open_file(self.path, "ab", _mode(part)) as target:
            while kept and (block := source.read(min(BLOCK, kept))):
                kept -= target.write(block)
            target.flush()
            os.fsync(target.fileno())
        part.unlink()


def _compress(plain: Path) -> None:
    """Beside it, under a hidden name until it is whole."""
    final = plain.with_name(f"{plain.name}.gz")
    for left in find_hidden_files(final):
        left.unlink()
    hidden = hidden_name(final)
    with open_file(plain, "rb") as source, open_file(hidden, "xb", _mode(plain)) as raw:
        with gzip.GzipFile(final.name, "wb", LEVEL, raw, mtime=0) as target:
            shutil.copyfileobj(source, target, BLOCK)
        raw.flush()
        os.fsync(raw.fileno())
    os.replace(hidden, final)
    sync_folder(plain.parent)


def _mode(file: Path) -> int:
    """Another part of the same lines gets it too."""
    return stat.S_IMODE(file.stat().st_mode)


def _open(file: Path) -> IO[bytes]:
    stream = open_file(file, "rb")
    return cast(IO[bytes], gzip.open(stream, "rb")) if file.suffix == ".gz" else stream


def _length(part: Path) -> int:
    """Bytes, uncompressed."""
    if part.suffix != ".gz":
        return part.stat().st_size
    with open_file(part, "rb") as stream:
        stream.seek(-SIZE_BYTES, os.SEEK_END)
        return int.from_bytes(stream.read(), "little")


def _truncate(file: Path, length: int) -> None:
    with open_file(file, "ab", None) as stream:
        stream.truncate(length)
        os.fsync(stream.fileno())
