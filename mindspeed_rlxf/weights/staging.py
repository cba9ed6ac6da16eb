"""A folder that appears whole or not at all, and whose finished parts outlive a killed process.

Parts are written to `NAME.partial` beside the folder. Its journal has a line for each finished part
with size and checksum; a later run of the same plan verifies these parts and writes the others.

The folder gets its name with its journal in it, which is removed last: a folder that has one is
whole, and what a killed process left beside it is cleared by the next one.

Only what the journal names is removed, and it names a file before the file is there. What else
stands in the folder, or beside it, is somebody's: it stays, or it is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.files.safe import (
    is_plain_path,
    leads_outside,
    open_file,
    sync_folder,
)

JOURNAL = "journal.jsonl"
PLAN, PART, REPLACES = "plan", "part", "replaces"  # keys of the journal's lines
BEGINS = "begins"  # a path that will be there
SCRATCH = re.compile(r"\.scratch-[0-9a-f]{16}")
READ_BYTES = 1 << 22


class StagedFolder:
    """The folder `target` while it is being written. Leave by `publish` or `close`."""

    def __init__(self, target: Path, plan: dict[str, Any], replace: bool) -> None:
        """plan: what decides the content; parts of another plan are thrown away.

        Errors: UserError when `target` is there (unless `replace`) or is being written by another.
        """
        self.target, self.replace = target, replace
        self.kept: dict[str, dict[str, Any]] = {}
        self._begun: list[str] = []  # paths that this journal says are ours
        self._before: Path | None = None  # where the older folder of this name is moved
        self._its_node: list[int] = []  # device and inode of that folder
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
        if self._before and self._is_replaced() and not _occupied(self.target):
            os.replace(self._before, self.target)  # killed between the two renames of `publish`
        try:
            self._check_target()
        except UserError:
            self._journal.close()
            raise
        if same:
            self._refuse_others({name.partition("/")[0] for name in self._begun})
        else:
            self._discard()
            self._refuse_others(set())
            self._journal.truncate(0)
            self._before, self._begun = None, []
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
        for line in lines:
            if REPLACES in line:
                self._before = self._read_replaced(line)
        same = lines[:1] == [{PLAN: plan}]
        named = [line.get(key) for line in lines for key in (BEGINS, PART) if key in line]
        self._begun = list(dict.fromkeys(str(name) for name in named if is_plain_path(name)))
        self.kept = {line[PART]: line for line in lines if same and PART in line}
        self._remove_scratch()
        return same

    def _read_replaced(self, line: dict[str, Any]) -> Path | None:
        """Where the journal says that the older folder is; None where no line of ours says it."""
        name, self._its_node = line[REPLACES], line.get("node", [])
        ours = re.escape(self.target.name) + r"\.replaced(-[0-9a-f]{16})?"
        if not isinstance(name, str) or not re.fullmatch(ours, name):
            return None
        return self.target.with_name(name)

    def _is_replaced(self) -> bool:
        """Whether the folder that was moved away is there, and no other one of its name."""
        assert self._before is not None, "no folder is replaced"
        return os.path.lexists(self._before) and _node(self._before) == self._its_node

    def _discard(self) -> None:
        """Remove the files that the journal names, and folders that are empty then."""
        for name in self._begun:
            path = self.folder / name
            is_file = path.is_symlink() or not path.is_dir()
            if is_file and not leads_outside(self.folder, path.parent):
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    for parent in path.relative_to(self.folder).parents[:-1]:
                        (self.folder / parent).rmdir()

    def _refuse_others(self, ours: set[str]) -> None:
        """Raise UserError where something else is in the folder: it would be published."""
        strange = sorted({path.name for path in self.folder.iterdir()} - ours - {JOURNAL})
        if strange:
            self._journal.close()
            rule = f"is in the way, and its journal does not name {', '.join(strange[:3])}"
            raise UserError(Problem(f"{self.folder}", rule, remedy="remove or rename it"))

    def _remove_scratch(self) -> None:
        for name in self._begun:
            if SCRATCH.fullmatch(name) and not (self.folder / name).is_symlink():
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _make(self) -> None:
        foreign = self.folder.exists() and not (self.folder / JOURNAL).exists()
        if self.folder.is_symlink() or (
            foreign and (not self.folder.is_dir() or any(self.folder.iterdir()))
        ):
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
            journal = open_file(path, "a", None, encoding="utf-8")
        except FileNotFoundError:  # the folder got its name just now
            raise busy from None
        except OSError as error:
            rule = f"cannot be written ({error.strerror})"
            raise UserError(Problem(f"{path}", rule, remedy="remove or rename it")) from None
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
        if line is None or path.is_symlink() or not path.is_file():
            return False
        if path.stat().st_size != line["size"]:
            return False
        return checksum(path) == line["crc32"]

    def note(self, part: str) -> Any:
        """What `write` of the part returned."""
        return self.kept[part]["note"]

    def write(self, part: str, write: Callable[[Path], Any]) -> None:
        """Have `write` put the part, by that name, into the folder it is given; then note it.

        The name is the part's only when it is whole.
        """
        scratch, place = self._make_scratch(), self.folder / part
        (scratch / part).parent.mkdir(parents=True, exist_ok=True)
        note = write(scratch)
        self._take_over(scratch, part)
        shutil.rmtree(scratch)
        line = {PART: part, "size": place.stat().st_size, "crc32": checksum(place), "note": note}
        self.kept[part] = line
        self._append(line)

    def write_beside(self, write: Callable[[Path], Any]) -> None:
        """Have `write` put small files, which are made anew each time, into the folder it gets."""
        scratch = self._make_scratch()
        write(scratch)
        for file in sorted(path for path in scratch.rglob("*") if path.is_file()):
            self._take_over(scratch, file.relative_to(scratch).as_posix())
        shutil.rmtree(scratch)

    def _make_scratch(self) -> Path:
        scratch = self.folder / f".scratch-{secrets.token_hex(8)}"
        self._begin(scratch.name)
        scratch.mkdir()
        return scratch

    def _take_over(self, scratch: Path, name: str) -> None:
        """A whole file gets its place; the journal names it before."""
        self._begin(name)
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(scratch / name, self.folder / name)

    def _begin(self, name: str) -> None:
        if name not in self._begun:
            self._begun.append(name)
            self._append({BEGINS: name})

    def publish(self) -> None:
        """Give the folder its name; an older one of that name is removed after that.

        Killed at any point, the next run with this plan ends it: either folder is whole somewhere.
        """
        if self.folder != self.target:
            if _occupied(self.target):
                self._move_away()
            os.replace(self.folder, self.target)
            sync_folder(self.target.parent)
        self._end()

    def _move_away(self) -> None:
        """The older folder, to a name that nothing has; the journal says so before it is done."""
        name = f"{self.target.name}.replaced-{secrets.token_hex(8)}"
        self._before, self._its_node = self.target.with_name(name), _node(self.target)
        self._append({REPLACES: name, "node": self._its_node})
        os.replace(self.target, self._before)

    def _end(self) -> None:
        """What is left to do when the folder has its name."""
        if self._before and self._is_replaced():
            _remove(self._before)
        (self.target / JOURNAL).unlink()
        sync_folder(self.target)
        self._journal.close()

    def close(self) -> None:
        """Stop here; what is finished stays for the next run."""
        self._journal.close()


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with open_file(path, "rb") as file:
        while data := file.read(READ_BYTES):
            value = zlib.crc32(data, value)
    return value


def _lines(journal: Path) -> tuple[list[dict[str, Any]], int]:
    """The journal's lines, without a last one that was cut off, and their length in bytes."""
    lines: list[dict[str, Any]] = []
    length = 0
    with open_file(journal, "rb") as file:
        content = file.read()
    for text in content.splitlines(keepends=True):
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
    if journal.is_symlink() or not journal.is_file():
        return False
    return any(PLAN in line for line in _lines(journal)[0][:1])


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


def _node(path: Path) -> list[int]:
    """What tells it from another of its name; of a link the link."""
    found = path.lstat()
    return [found.st_dev, found.st_ino]
