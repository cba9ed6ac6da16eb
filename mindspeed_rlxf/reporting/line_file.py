"""A growing file of lines whose older parts are compressed; a kill at any moment loses no line.

    samples.jsonl        the part that is being written
    samples.jsonl.1.gz   the oldest part, then .2.gz, ...

A full file is renamed to `samples.jsonl.N`, compressed beside it, and removed when
`samples.jsonl.N.gz` is complete. After a kill no line is lost or doubled; an interrupted
compression is finished by the next `cut`, or `rotate` of a full file.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from mindspeed_rlxf.config.errors import Problem, UserError
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
    """All parts of one file, as one sequence of bytes; the file need not exist.

    limit: size in bytes from which `rotate` compresses the file; 0 = never
    """

    def __init__(self, path: Path, limit: int = 0) -> None:
        self.path, self.limit = path, limit

    def position(self) -> int:
        """Return the uncompressed size of the file and its parts, where the next line will begin.

        In bytes; 0 if there are none.
        """
        parts = sum(_uncompressed_size(part) for part in self._find_parts().values())
        return parts + (self.path.stat().st_size if self.path.exists() else 0)

    def sync(self) -> None:
        """Fsync the uncompressed file, if it exists."""
        if self.path.exists():
            with open_file(self.path, "rb") as stream:
                os.fsync(stream.fileno())

    def exists(self) -> bool:
        """Whether the file or an older part of it exists, compressed or not."""
        return self.path.exists() or bool(self._find_parts())

    def lines(self) -> Iterator[bytes]:
        """Yield all lines with their line ends, oldest first; a kill may have cut the last one.

        Nothing if there is no file. Damaged parts raise OSError, EOFError or zlib.error, after the
        lines before the damage.
        """
        files = [*self._find_parts().values(), *([self.path] if self.path.exists() else [])]
        for file in files:
            with _open(file) as stream:
                yield from stream

    def cut(self, position: int) -> None:
        """Drop the bytes after `position`, which counts from the start of the oldest part.

        A kill meanwhile loses none of the bytes to keep, so that the call can be repeated. The file
        keeps its inode: open streams still append to it. Raises ValueError if there are fewer bytes
        than `position`, UserError if the part that contains `position` is damaged.
        """
        self._compress_parts()
        if (found := self.position()) < position:
            raise ValueError(
                f"{self.path} must have the {position} bytes that it had at the checkpoint, it has "
                f"{found}; put it back with its parts, or start a new run"
            )
        kept = position
        parts = list(self._find_parts().values())
        while parts and kept >= _uncompressed_size(parts[0]):
            kept -= _uncompressed_size(parts.pop(0))
        if self.path.exists():
            _truncate(self.path, 0 if parts else kept)
        for part in reversed(parts[1:]):
            part.unlink()
        if parts:
            self._restore_part(parts[0], kept)

    def rotate(self) -> bool:
        """Compress the file as a new part if it has reached the limit; return whether it had.

        Waits for the compression. After True, streams that append to the file must be opened again.
        Always False with limit 0.
        """
        if not self.limit or not self.path.exists() or self.path.stat().st_size < self.limit:
            return False
        self._compress_parts()
        number = max(self._find_parts(), default=0) + 1
        self.path.rename(self._part(number))
        sync_folder(self.path.parent)
        self._compress_parts()
        return True

    def _find_parts(self) -> dict[int, Path]:
        """Return number -> file of the older parts, by number, which is oldest first.

        If a number has a plain and a compressed file, the compressed one.
        """
        pattern = re.compile(re.escape(self.path.name) + r"\.(\d+)(\.gz)?")
        found = {}
        for file in sorted(self.path.parent.glob(self.path.name + ".*")):  # .N before .N.gz
            if match := pattern.fullmatch(file.name):
                found[int(match[1])] = file
        return dict(sorted(found.items()))

    def _part(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _compress_parts(self) -> None:
        """Compress the parts that are not compressed yet, and remove their plain files."""
        for number, part in self._find_parts().items():
            plain = self._part(number)
            if part == plain:
                _compress_file(plain)
            plain.unlink(missing_ok=True)

    def _restore_part(self, part: Path, kept: int) -> None:
        """Append the first `kept` uncompressed bytes of a part to the file, and delete the part.

        Raises UserError, and keeps the part, if it is damaged.
        """
        with _open(part) as source, open_file(self.path, "ab", _mode(part)) as target:
            try:
                while kept and (block := source.read(min(BLOCK, kept))):
                    kept -= target.write(block)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                remedy = "put it back, or set training.new_run=true"
                rule = f"must be compressed lines ({error})"
                raise UserError(Problem(str(part), rule, remedy=remedy)) from None
            target.flush()
            os.fsync(target.fileno())
        part.unlink()


def _compress_file(plain: Path) -> None:
    """Compress `plain` to `plain.gz`, which appears only when it is complete; `plain` stays."""
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
    """Return the permission bits of a file, for other files with the same lines."""
    return stat.S_IMODE(file.stat().st_mode)


def _open(file: Path) -> IO[bytes]:
    stream = open_file(file, "rb")
    return cast(IO[bytes], gzip.open(stream, "rb")) if file.suffix == ".gz" else stream


def _uncompressed_size(part: Path) -> int:
    """Return the uncompressed bytes of a part.

    Of a compressed part the size in its last bytes, which is modulo 4 GiB.
    """
    if part.suffix != ".gz":
        return part.stat().st_size
    with open_file(part, "rb") as stream:
        stream.seek(-SIZE_BYTES, os.SEEK_END)
        return int.from_bytes(stream.read(), "little")


def _truncate(file: Path, length: int) -> None:
    with open_file(file, "ab", None) as stream:
        stream.truncate(length)
        os.fsync(stream.fileno())
