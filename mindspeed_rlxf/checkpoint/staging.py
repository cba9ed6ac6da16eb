"""A folder that appears whole or not at all, and whose finished parts outlive a killed process.

Parts are written to `NAME.partial` beside the folder. Its journal has a line for each finished part
with size and checksum; a later run of the same plan verifies these parts and writes the others.

The folder gets its name with its journal in it, which is removed last: a folder that has one is
whole, and what a killed process left beside it is cleared by the next one.
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

from mindspeed_rlxf.config.errors import Problem, UserError

JOURNAL = "journal.jsonl"
SCRATCH = "scratch"
PLAN, PART, REPLACES = "plan", "part", "replaces"  # keys of the journal's lines
READ_BYTES = 1 << 22


class StagedFolder:
    """The folder `target` while it is being written. Leave by `publish` or `close`."""

    def __init__(self, target: Path, plan: dict[str, Any], replace: bool) -> None:
        """plan: what decides the content; parts of another plan are thrown away.

        Errors: UserError when `target` is there (unless `replace`) or is being written by another.
        """
        self.target, self.replace = target, replace
        self._before = target.with_name(target.name + ".replaced")
        self.kept: dict[str, dict[str, Any]] = {}
        self._replaces = False  # `_before` was the target
        self._journal: IO[str]
        if not self._take_named(plan):
            self._take_partial(plan)

    def _take_named(self, plan: dict[str, Any]) -> bool:
        """Whether the target is whole by this plan, and its writer was killed before the end.

        Of another plan, that end is made up for.
        """
        self.folder = self.target
        if not _has_plan(self.target / JOURNAL):
            return False
        self._journal = self._lock()
        if self._read_journal(plan):
            return True
        self._end()
        return False

    def _take_partial(self, plan: dict[str, Any]) -> None:
        self.folder = self.target.with_name(self.target.name + ".partial")
        self._check_target()
        self._make()
        self._journal = self._lock()
        same = self._read_journal(plan)
        if self._replaces and not _occupied(self.target) and _occupied(self._before):
            os.replace(self._before, self.target)  # killed between the two renames of `publish`
        try:
            self._check_target()
        except UserError:
            self._journal.close()
            raise
        if not same:
            for path in self.folder.iterdir():
                if path.name != JOURNAL:
                    _remove(path)
            self._journal.truncate(0)
            self._replaces = False
            self._append({PLAN: plan})

    def _check_target(self) -> None:
        if not self.replace and _occupied(self.target):
            raise UserError(
                Problem(
                    f"{self.target}", "must not exist yet", remedy="give another folder, or --force"
                )
            )

    def _read_journal(self, plan: dict[str, Any]) -> bool:
        """Whether the journal is of this plan; its parts are kept then.

        A last line that was cut off is removed: what is appended would not be read after it.
        """
        lines, length = _lines(self.folder / JOURNAL)
        self._journal.truncate(length)
        self._replaces = any(REPLACES in line for line in lines)
        same = lines[:1] == [{PLAN: plan}]
        self.kept = {line[PART]: line for line in lines if same and PART in line}
        return same

    def _make(self) -> None:
        foreign = self.folder.exists() and not (self.folder / JOURNAL).exists()
        if foreign and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise UserError(
                Problem(
                    f"{self.folder}", "is in the way and not ours", remedy="remove or rename it"
                )
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                Problem(
                    f"{self.folder}",
                    f"cannot be made ({error.strerror})",
                    remedy="give another folder",
                )
            ) from None

    def _lock(self) -> IO[str]:
        path = self.folder / JOURNAL
        rule = "is being written by another process"
        busy = UserError(Problem(f"{self.target}", rule, remedy="wait for it"))
        try:
            journal = path.open("a", encoding="utf-8")
        except FileNotFoundError:  # the folder got its name just now
            raise busy from None
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(journal.fileno()), path.stat()):
                raise FileNotFoundError("as above")
        except OSError:
            journal.close()
            raise busy from None
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
        place, scratch = self.folder / part, self.folder / SCRATCH
        shutil.rmtree(scratch, ignore_errors=True)
        (scratch / part).parent.mkdir(parents=True)
        note = write(scratch)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(scratch / part, place)
        shutil.rmtree(scratch)
        line = {PART: part, "size": place.stat().st_size, "crc32": checksum(place), "note": note}
        self.kept[part] = line
        self._append(line)

    def publish(self) -> None:
        """Give the folder its name; an older one of that name is removed after that.

        Killed at any point, the next run with this plan ends it: either folder is whole somewhere.
        """
        shutil.rmtree(self.folder / SCRATCH, ignore_errors=True)
        if self.folder != self.target:
            if _occupied(self.target):
                _remove(self._before)  # of a run that was killed; its target is there
                self._append({REPLACES: self._before.name})
                self._replaces = True
                os.replace(self.target, self._before)
            os.replace(self.folder, self.target)
            _sync(self.target.parent)
        self._end()

    def _end(self) -> None:
        """What is left to do when the folder has its name."""
        if self._replaces:
            _remove(self._before)
        (self.target / JOURNAL).unlink()
        _sync(self.target)
        self._journal.close()

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


def _lines(journal: Path) -> tuple[list[dict[str, Any]], int]:
    """The journal's lines, without a last one that was cut off, and their length in bytes."""
    lines: list[dict[str, Any]] = []
    length = 0
    for text in journal.read_bytes().splitlines(keepends=True):
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict) or not text.endswith(b"\n"):
            break
        lines.append(line)
        length += len(text)
    return lines, length


def _has_plan(journal: Path) -> bool:
    """Whether it is ours: a folder that is replaced may hold another file of that name."""
    return journal.is_file() and any(PLAN in line for line in _lines(journal)[0][:1])


def _occupied(path: Path) -> bool:
    """Whether something is there; an empty folder is nothing."""
    if path.is_symlink() or not path.is_dir():
        return os.path.lexists(path)
    return any(path.iterdir())


def _remove(path: Path) -> None:
    """Whatever it is, if it is there; of a link the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
