"""A folder that appears whole or not at all, and whose finished parts outlive a killed process.

Parts are written to `NAME.partial` beside the folder. Its journal has a line for each finished part
with size and checksum; a later run of the same plan verifies these parts and writes the others.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from mindspeed_rlxf.config.errors import UserError

JOURNAL = "journal.jsonl"
READ_BYTES = 1 << 22


class StagedFolder:
    """The folder `target` while it is being written. Leave by `publish` or `close`."""

    def __init__(self, target: Path, plan: dict[str, Any], replace: bool) -> None:
        """plan: what decides the content; parts of another plan are thrown away.

        Errors: UserError when `target` is there (unless `replace`) or is being written by another.
        """
        self.target, self.replace = target, replace
        self.folder = target.with_name(target.name + ".partial")
        if target.exists() and not replace and not (target.is_dir() and not any(target.iterdir())):
            raise UserError(f"{target} must not exist yet; give another folder, or --force")
        self._make()
        self._journal: IO[str] = self._lock()
        self.kept: dict[str, dict[str, Any]] = {}
        lines = _lines(self.folder / JOURNAL)
        if lines and lines[0] == {"plan": plan}:
            self.kept = {line["part"]: line for line in lines[1:]}
        else:
            for path in self.folder.iterdir():
                if path.name != JOURNAL:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            self._journal.truncate(0)
            self._append({"plan": plan})

    def _make(self) -> None:
        foreign = self.folder.exists() and not (self.folder / JOURNAL).exists()
        if foreign and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise UserError(f"{self.folder} is in the way and not ours; remove or rename it")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be made ({error.strerror}); give another folder"
            ) from None

    def _lock(self) -> IO[str]:
        journal = (self.folder / JOURNAL).open("a", encoding="utf-8")
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            journal.close()
            raise UserError(
                f"{self.target} is being written by another process; wait for it"
            ) from None
        return journal

    def _append(self, line: dict[str, Any]) -> None:
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def finished(self, part: str) -> bool:
        """Whether an earlier run wrote the part and it is still what was written."""
        line = self.kept.get(part)
        path = self.folder / part
        if line is None or not path.is_file() or path.stat().st_size != line["size"]:
            return False
        return checksum(path) == line["crc32"]

    def note(self, part: str) -> Any:
        """What `write` of the part returned."""
        return self.kept[part]["note"]

    def write(self, part: str, write: Callable[[Path], Any]) -> None:
        """Have `write` put the part, by that name, into the folder it is given; then note it.

        The name is the part's only when it is whole.
        """
        place, scratch = self.folder / part, self.folder / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        (scratch / part).parent.mkdir(parents=True)
        note = write(scratch)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(scratch / part, place)
        shutil.rmtree(scratch)
        line = {"part": part, "size": place.stat().st_size, "crc32": checksum(place), "note": note}
        self.kept[part] = line
        self._append(line)

    def publish(self) -> None:
        """Give the folder its name; an older one of that name is removed after that."""
        self._journal.close()
        (self.folder / JOURNAL).unlink()
        shutil.rmtree(self.folder / "scratch", ignore_errors=True)
        before = self.target.with_name(self.target.name + ".replaced")
        if self.target.exists():
            os.replace(self.target, before)
        os.replace(self.folder, self.target)
        _sync(self.target.parent)
        if before.exists():
            shutil.rmtree(before) if before.is_dir() else before.unlink()

    def close(self) -> None:
        """Stop here; what is finished stays for the next run."""
        self._journal.close()


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            value = zlib.crc32(data, value)
    return value


def _lines(journal: Path) -> list[dict[str, Any]]:
    """The journal's lines, without a last one that was cut off."""
    lines = []
    for text in journal.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
