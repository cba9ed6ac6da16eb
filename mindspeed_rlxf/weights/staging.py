"""A folder that appears whole or not at all, and whose finished parts outlive a killed process.

Parts are written to `NAME.partial` beside the folder. Its journal has a line for each finished part
with size and checksum; a later run of the same plan verifies these parts and writes the others.

The folder is renamed while the journal is still in it, and the journal is removed last. A folder
with the final name is complete; the next process removes leftovers of a killed one.

Only files that the journal names are removed; it names a file before the file is there. Other files
in the folder, or beside it, belong to somebody else: they stay, or they are an error.
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
BEGINS = "begins"  # a path that is about to be made
SCRATCH = re.compile(r"\.scratch-[0-9a-f]{16}")
READ_BYTES = 1 << 22


class StagedFolder:
    """The folder `target` while it is being written; call `publish` when complete, else `close`."""

    def __init__(self, target: Path, plan: dict[str, Any], replace: bool) -> None:
        """Open and lock the partial folder; keep finished parts of an interrupted run.

        If a run with this plan was killed after it had renamed the folder, continues in the target.
        plan:    JSON value that determines the content; parts of another plan are removed
        replace: replace an existing target
        Raises UserError when `target` exists without `replace`, another process writes it, the
        partial folder cannot be made or written, or it has files that its journal does not name.
        """
        self.target, self.replace = target, replace
        self.kept: dict[str, dict[str, Any]] = {}
        self._begun: list[str] = []  # paths that the journal names
        self._before: Path | None = None  # where the older folder of this name is moved
        self._node_before: list[int] = []  # device and inode of that folder
        self._journal: IO[str]
        if not self._open_published(plan):
            self._open_partial(plan)

    def _open_published(self, plan: dict[str, Any]) -> bool:
        """Whether a run with this plan was killed after it had renamed the folder to the target.

        Then the target is locked and its journal read. For such a run with another plan, returns
        False after removing its journal and the older target.
        """
        self.folder = self.target
        if not _has_plan(self.target / JOURNAL):
            return False
        self._journal = self._lock_journal()
        same = self._read_journal(plan)
        if not same:
            self._finish()
        return same

    def _open_partial(self, plan: dict[str, Any]) -> None:
        """Make and lock the partial folder, and read its journal.

        With the journal of this plan, finished files stay; else parts of the other plan are removed
        and a new journal begins. Moves an older target back if a run was killed between the two
        renames of `publish`. Raises UserError as `__init__` does, also for files that the journal
        does not list.
        """
        self.folder = self.target.with_name(self.target.name + ".partial")
        self._check_target()
        self._make_folder()
        self._journal = self._lock_journal()
        same = self._read_journal(plan)
        if self._before and self._is_replaced() and not _is_occupied(self.target):
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
            self._append_line({PLAN: plan})

    def _check_target(self) -> None:
        """Raise UserError if the target exists, unless it may be replaced or is an empty folder."""
        if not self.replace and _is_occupied(self.target):
            raise UserError(
                Problem(
                    f"{self.target}", "must not exist yet", remedy="give another folder, or --force"
                )
            )

    def _read_journal(self, plan: dict[str, Any]) -> bool:
        """Read the journal into `kept` (parts) and `_begun` (paths); return if its plan is `plan`.

        With another plan or none, `kept` becomes empty. Also sets `_before` to where an older
        target was moved. Truncates the journal at the first line that is incomplete or no JSON
        object, and removes scratch folders of earlier runs.
        """
        lines, length = _read_lines(self.folder / JOURNAL)
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
        """Read a line of the journal: return the path that an older target was moved to.

        None for a name that this module does not make. Stores the older target's device and inode
        from the line, [] if it has none, in `_node_before`.
        """
        name, self._node_before = line[REPLACES], line.get("node", [])
        ours = re.escape(self.target.name) + r"\.replaced(-[0-9a-f]{16})?"
        if not isinstance(name, str) or not re.fullmatch(ours, name):
            return None
        return self.target.with_name(name)

    def _is_replaced(self) -> bool:
        """Whether the older target is where it was moved to, by device and inode.

        False if none was moved away.
        """
        path = self._before
        if path is None or not os.path.lexists(path):
            return False
        return _device_and_inode(path) == self._node_before

    def _discard(self) -> None:
        """Remove the files that the journal names, and folders that become empty by that.

        Leaves subfolders that the journal names, and files that a linked folder puts outside.
        """
        for name in self._begun:
            path = self.folder / name
            is_file = path.is_symlink() or not path.is_dir()
            if is_file and not leads_outside(self.folder, path.parent):
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    for parent in path.relative_to(self.folder).parents[:-1]:
                        (self.folder / parent).rmdir()

    def _refuse_others(self, ours: set[str]) -> None:
        """Raise UserError if the folder holds anything but `ours` and the journal.

        Closes the journal first. ours: names of files and subfolders directly in the folder
        """
        strange = sorted({path.name for path in self.folder.iterdir()} - ours - {JOURNAL})
        if strange:
            self._journal.close()
            rule = f"holds files that no conversion wrote: {', '.join(strange[:3])}"
            raise UserError(Problem(f"{self.folder}", rule, remedy="remove or rename it"))

    def _remove_scratch(self) -> None:
        for name in self._begun:
            if SCRATCH.fullmatch(name) and not (self.folder / name).is_symlink():
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _make_folder(self) -> None:
        """Make the partial folder and those above it, or reuse one with a journal or no content.

        Raises UserError where a link or something else has its name, or it cannot be made.
        """
        foreign = self.folder.exists() and not (self.folder / JOURNAL).exists()
        if self.folder.is_symlink() or (
            foreign and (not self.folder.is_dir() or any(self.folder.iterdir()))
        ):
            rule = "exists, and no conversion made it"
            raise UserError(Problem(f"{self.folder}", rule, remedy="remove or rename it"))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            rule = f"cannot be made ({error.strerror})"
            raise UserError(Problem(f"{self.folder}", rule, remedy="give another folder")) from None

    def _lock_journal(self) -> IO[str]:
        """Open the journal, made if absent, and lock it without waiting; return it.

        Raises UserError when another process has the lock or has renamed or removed the folder or
        the journal meanwhile, or when the journal cannot be written.
        """
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
        except BlockingIOError:
            journal.close()
            raise busy from None
        except OSError as error:  # some network file systems
            journal.close()
            rule = f"must be on a file system with locks ({error.strerror})"
            raise UserError(Problem(f"{path}", rule, remedy="give a folder on another")) from None
        try:
            if not os.path.samestat(os.fstat(journal.fileno()), path.stat()):
                raise FileNotFoundError("as above")
        except OSError:
            journal.close()
            raise busy from None
        return journal

    def _append_line(self, line: dict[str, Any]) -> None:
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def is_finished(self, part: str) -> bool:
        """Whether a part is listed in `kept` and its file has the size and CRC-32 listed there.

        False for a link.
        """
        line, path = self.kept.get(part), self.folder / part
        if line is None or path.is_symlink() or not path.is_file():
            return False
        return path.stat().st_size == line["size"] and checksum(path) == line["crc32"]

    def note(self, part: str) -> Any:
        """Return the value that the `write` function of a finished part returned."""
        return self.kept[part]["note"]

    def write(self, part: str, write: Callable[[Path], Any]) -> None:
        """Write one part: call `write` with a scratch folder in which it must make the file `part`.

        The complete file is moved to the partial folder and listed in the journal and in `kept`
        with its size, CRC-32 and the value that `write` returned (JSON). Then the scratch folder is
        removed; if `write` raises, it stays until the next run with this target.
        """
        scratch, place = self._make_scratch(), self.folder / part
        (scratch / part).parent.mkdir(parents=True, exist_ok=True)
        note = write(scratch)
        self._move(scratch, part)
        shutil.rmtree(scratch)
        line = {PART: part, "size": place.stat().st_size, "crc32": checksum(place), "note": note}
        self.kept[part] = line
        self._append_line(line)

    def write_beside(self, write: Callable[[Path], Any]) -> None:
        """Write small files: call `write` with a scratch folder, then move all files out of it.

        They go to the same paths in the partial folder, and may be in subfolders. They are not
        listed as finished parts, so every run writes them again.
        """
        scratch = self._make_scratch()
        write(scratch)
        for file in sorted(path for path in scratch.rglob("*") if path.is_file()):
            self._move(scratch, file.relative_to(scratch).as_posix())
        shutil.rmtree(scratch)

    def _make_scratch(self) -> Path:
        """List a scratch folder of random name in the journal, make it and return its path."""
        scratch = self.folder / f".scratch-{secrets.token_hex(8)}"
        self._begin(scratch.name)
        scratch.mkdir()
        return scratch

    def _move(self, scratch: Path, name: str) -> None:
        """Move a complete file from `scratch` to the folder, where it replaces one of that name.

        First lists the name in the journal, unless it is there already, and makes missing
        subfolders.
        """
        self._begin(name)
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(scratch / name, self.folder / name)

    def _begin(self, name: str) -> None:
        if name not in self._begun:
            self._begun.append(name)
            self._append_line({BEGINS: name})

    def publish(self) -> None:
        """Rename the partial folder to the target, remove the journal and close it.

        An older target is moved away first, then removed; the rename is left out if an earlier run
        made it. If the process is killed here, both folders are whole, and the next run with this
        plan finishes. Raises UserError if a target has appeared that may not be replaced.
        """
        if self.folder != self.target:
            self._check_target()  # it may have appeared meanwhile
            if _is_occupied(self.target):
                self._move_away()
            os.replace(self.folder, self.target)
            sync_folder(self.target.parent)
        self._finish()

    def _move_away(self) -> None:
        """Rename the older target to a new random name, after writing that name to the journal.

        Stores the new path in `_before`, the target's device and inode in `_node_before`.
        """
        name = f"{self.target.name}.replaced-{secrets.token_hex(8)}"
        self._before = self.target.with_name(name)
        self._node_before = _device_and_inode(self.target)
        self._append_line({REPLACES: name, "node": self._node_before})
        os.replace(self.target, self._before)

    def _finish(self) -> None:
        """Remove the older target, if it was moved aside, and the journal; close the journal."""
        if self._before and self._is_replaced():
            _remove(self._before)
        (self.target / JOURNAL).unlink()
        sync_folder(self.target)
        self._journal.close()

    def close(self) -> None:
        """Close the journal, which unlocks the folder; finished parts stay for the next run."""
        self._journal.close()


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with open_file(path, "rb") as file:
        while data := file.read(READ_BYTES):
            value = zlib.crc32(data, value)
    return value


def _read_lines(journal: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the journal's JSON objects, one per line, and the length of these lines in bytes.

    Stops at the first line that is incomplete or no JSON object.
    """
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
    """Whether the path is a file whose first line is that of a journal of this module.

    That is a JSON object with the key PLAN. False for a link.
    """
    is_file = journal.is_file() and not journal.is_symlink()
    return is_file and any(PLAN in line for line in _read_lines(journal)[0][:1])


def _is_occupied(path: Path) -> bool:
    """Whether the path exists and is not an empty folder; a link counts as existing."""
    if path.is_symlink() or not path.is_dir():
        return os.path.lexists(path)
    return any(path.iterdir())


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, but not what a link leads to.

    Does nothing for a path that does not exist.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _device_and_inode(path: Path) -> list[int]:
    """Return device and inode of a path, which identify it after a rename; links not followed."""
    found = path.lstat()
    return [found.st_dev, found.st_ino]
