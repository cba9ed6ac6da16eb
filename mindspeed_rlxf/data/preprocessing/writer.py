"""Write an indexed data set to a partial folder, and move it to its final names once complete.

A list of the moves is written before the first move. If the writer is killed between two moves, the
next writer of the prefix makes the remaining ones, so the data set is never lost.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Literal

import numpy as np

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.data.handlers import Handler
from mindspeed_rlxf.data.indexed import IndexedReader, IndexedWriter
from mindspeed_rlxf.data.preprocessing.row_encoder import EncodedChunk
from mindspeed_rlxf.data.sidecar import (
    MASK,
    MOVES,
    TOKEN_IDS,
    Column,
    Sidecar,
    column_files,
    data_path,
    file_name,
    partial_folder,
    rejected_path,
    sidecar_path,
)
from mindspeed_rlxf.files.plain import open_plain
from mindspeed_rlxf.files.safe import is_plain_path, new_file, open_file, replace_file

logger = logging.getLogger(__name__)

PREFIX = "--output-prefix"
MAX_COLUMNS = 256  # each keeps a file open


def existing_files(prefix: Path) -> list[Path]:
    """List the existing files of this prefix's data set: sidecar, columns, rejected rows.

    They are in the order of removal: the sidecar, then of each column the .idx file first, columns
    of token ids before others. Without the .idx of the token ids the other files are no data set.
    """
    columns = sorted(column_files(prefix), key=lambda name: not name.endswith(TOKEN_IDS))
    paths = [data_path(prefix, name) for name in columns]
    parts = [Path(f"{path}{ending}") for path in paths for ending in (".idx", ".bin")]
    return [f for f in (sidecar_path(prefix), *parts, rejected_path(prefix)) if f.exists()]


def finish_interrupted(prefix: Path) -> None:
    """Move a complete data set whose writer was killed to its final names, and log a warning.

    Removes the partial folder then. Does nothing where that has no list of moves. Raises UserError
    when another process writes to the prefix, and OSError.
    """
    folder = partial_folder(prefix)
    if (folder / MOVES).exists():
        with _lock_folder(folder, prefix):
            _make_moves(folder, prefix)
            shutil.rmtree(folder, ignore_errors=True)
        logger.warning("%s: moved the complete data set of an interrupted run into place", prefix)


class PromptSetWriter:
    """Writes one data set to a partial folder, which is removed at exit; `commit` publishes it.

    A context manager. Only a `commit` that fails between two moves leaves the folder, for
    `finish_interrupted`. Raises UserError when another process writes to the prefix, and OSError.
    """

    def __init__(self, prefix: Path, handler: Handler) -> None:
        self._prefix, self._handler = prefix, handler
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._folder = partial_folder(prefix)
        self._folder.mkdir(exist_ok=True)  # a killed run may have left it; its files are replaced
        self._lock = _lock_folder(self._folder, prefix)  # held until __exit__
        self._own = [*handler.sequences, *([MASK] if handler.has_mask else [])]
        self._writers = {name: IndexedWriter(self._folder / name, np.int32) for name in self._own}
        self._files: dict[str, str] = {}  # column -> name in file names
        self._rejected = new_file(
            self._folder / "rejected", encoding="utf-8", errors="backslashreplace"
        )
        self.num_rows = 0

    def __enter__(self) -> PromptSetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._rejected.close()
        if not (self._folder / MOVES).exists():
            shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def add(self, chunk: EncodedChunk) -> None:
        """Write a chunk: token sequences, mask (all 1, if the handler has one), columns, rejects.

        A column that earlier chunks lack gets null for their rows, and so does one that this chunk
        lacks. Rejected rows are lines of JSON. Raises UserError for more than MAX_COLUMNS columns.
        """
        for name in self._handler.sequences:
            self._writers[name].add(chunk.sequences[name].items, chunk.sequences[name].lengths)
        if self._handler.has_mask:
            lengths = chunk.sequences[TOKEN_IDS].lengths
            self._writers[MASK].add(np.ones(sum(lengths), dtype=np.int32).tobytes(), lengths)
        for name in chunk.columns:
            if name not in self._files:
                self._start_column(name)
        for name, file in self._files.items():
            values = chunk.columns.get(name) or [None] * chunk.num_rows
            _add_values(self._writers[file], values)
        for reject in chunk.rejected:
            line = {**asdict(reject), "problem": str(reject.problem)}
            self._rejected.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.num_rows += chunk.num_rows

    def append(self, columns: Mapping[str, IndexedReader]) -> None:
        """Append the sequences of another data set's columns, and start the columns that are new.

        columns: opened columns of that data set, all of them, by the names in their file names
        """
        for file, reader in columns.items():
            if file not in self._writers:
                self._writers[file] = IndexedWriter(self._folder / file, reader.dtype.type)
            self._writers[file].add_all(reader)

    def append_rejected(self, file: Path) -> None:
        r"""Append the file of rejected rows of another data set; invalid UTF-8 becomes \xNN."""
        with open_plain(file) as lines:
            text = io.TextIOWrapper(lines, encoding="utf-8", errors="backslashreplace")
            shutil.copyfileobj(text, self._rejected)

    def commit(self, sidecar: Sidecar, has_rejected: bool) -> None:
        """Publish the data set: close its files and move them in place of an older one's.

        The sidecar is moved last. has_rejected: publish the file of rejected rows too
        """
        for writer in self._writers.values():
            writer.close()
        self._rejected.close()
        # Names of columns may have half a surrogate pair, which UTF-8 cannot encode.
        text = sidecar.json_text().encode("utf-8", "backslashreplace")
        replace_file(self._folder / "meta", text)
        moves = [("rejected", rejected_path(self._prefix).name)] if has_rejected else []
        for name in reversed(self._writers):  # the prompts' index last
            target = data_path(self._prefix, name).name
            moves += [(f"{name}{ending}", f"{target}{ending}") for ending in (".bin", ".idx")]
        moves.append(("meta", sidecar_path(self._prefix).name))
        replace_file(self._folder / MOVES, json.dumps(moves))
        _make_moves(self._folder, self._prefix)

    def columns(self) -> list[Column]:
        """Describe every column that was written, for the sidecar."""
        return [
            Column(name=name, file=name, dtype="int32", encoding=_encoding(name))
            for name in self._own
        ] + [
            Column(name=name, file=file, dtype="uint8", encoding="json")
            for name, file in self._files.items()
        ]

    def _start_column(self, name: str) -> None:
        """Open the file of a new column and write null for each row so far.

        name: of the column in the rows; the file gets a name made from it
        Raises UserError if there are MAX_COLUMNS columns already.
        """
        if len(self._files) == MAX_COLUMNS:
            rule = f"must have at most {MAX_COLUMNS} different columns, {name!r} is one more"
            remedy = "put columns that differ from row to row into one nested column"
            raise UserError(Problem("rows", rule, remedy=remedy))
        self._files[name] = file_name(name, set(self._writers))
        writer = IndexedWriter(self._folder / self._files[name], np.uint8)
        _add_values(writer, [None] * self.num_rows)
        self._writers[self._files[name]] = writer


def _add_values(writer: IndexedWriter, values: Sequence[bytes | None]) -> None:
    whole = [b"null" if value is None else value for value in values]
    writer.add(b"".join(whole), [len(value) for value in whole])


def _encoding(name: str) -> Literal["token_ids", "labels", "mask"]:
    if name == MASK:
        return "mask"
    return "token_ids" if name.endswith(TOKEN_IDS) else "labels"


def _make_moves(folder: Path, prefix: Path) -> None:
    """Make the moves that are listed in `folder` and were not made before; then remove the list.

    Removes the files of an older data set at `prefix` first, but not those moved already.
    """
    moves = [(folder / name, prefix.with_name(to)) for name, to in _read_moves(folder)]
    made = {target for source, target in moves if not source.exists()}
    for file in existing_files(prefix):
        if file not in made:
            file.unlink()
    for source, target in moves:
        if target not in made:
            source.rename(target)
    (folder / MOVES).unlink()


def _read_moves(folder: Path) -> list[list[str]]:
    """Read the list of moves from the file MOVES in `folder`: [name in the folder, final name].

    Raises OSError if a name is a path with folders, or if the file is missing.
    """
    with open_file(folder / MOVES, "r", encoding="ascii") as stream:
        moves: list[list[str]] = json.load(stream)
    names = [name for move in moves for name in move]
    if not all(is_plain_path(name) and "/" not in name for name in names):
        raise OSError(errno.EINVAL, "its list of moves names files elsewhere", str(folder / MOVES))
    return moves


def exists_problem(output_prefix: str, name: str) -> Problem:
    """Make the problem that `output_prefix` must be new, but its file `name` exists."""
    remedy = "take another prefix or give --overwrite"
    return Problem(PREFIX, f"must be new, {name} exists", output_prefix, remedy)


@contextmanager
def report_write_errors(output_prefix: str) -> Iterator[None]:
    """Turn an OSError inside the block into a UserError about the output prefix."""
    try:
        yield
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        remedy = "check the folder, its rights and the space on the disk"
        raise UserError(Problem(PREFIX, rule, output_prefix, remedy)) from error


def _lock_folder(folder: Path, prefix: Path) -> IO[str]:
    """Lock the folder by its file `lock`, made if absent, until the returned file is closed.

    Raises UserError at once when another process has the lock, OSError when the folder is a link.
    """
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"{folder.name} is a link; remove it", str(folder))
    lock = open_file(folder / "lock", "w", None)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        rule = "must have one writer, another process is writing it"
        remedy = "wait for it or take another prefix"
        raise UserError(Problem(PREFIX, rule, prefix, remedy)) from error
    return lock
