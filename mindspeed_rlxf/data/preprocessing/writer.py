"""Writes an indexed data set beside its final names and moves it there when it is whole.

Once it is whole, a list of the moves lies beside it: a writer that is killed between them loses
neither the older data set of the prefix nor the new one, as the next writer makes the rest of them.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
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
MAX_COLUMNS = 256  # each holds a file open


def existing_files(prefix: Path) -> list[Path]:
    """Files of a data set under this prefix, the sidecar first, the index of the prompts next.

    In this order a removal that is interrupted leaves nothing that could be taken for a data set.
    """
    columns = sorted(column_files(prefix), key=lambda name: not name.endswith(TOKEN_IDS))
    parts = [_part(prefix, name, ending) for name in columns for ending in (".idx", ".bin")]
    return [f for f in (sidecar_path(prefix), *parts, rejected_path(prefix)) if f.exists()]


def finish_interrupted(prefix: Path) -> None:
    """Puts a data set in place whose writer was killed after it was whole."""
    folder = partial_folder(prefix)
    if (folder / MOVES).exists():
        with _locked(folder, prefix):
            _make_moves(folder, prefix)
            shutil.rmtree(folder, ignore_errors=True)
        logger.warning("%s: the data set of an interrupted run was whole, it is in place", prefix)


class PromptSetWriter:
    """Use as a context: without `commit` nothing is left.

    Raises UserError when another process writes to the prefix, OSError when the disk refuses.
    """

    def __init__(self, prefix: Path, handler: Handler) -> None:
        self._prefix, self._handler = prefix, handler
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._folder = partial_folder(prefix)
        self._folder.mkdir(exist_ok=True)  # of a run that was killed: its files are replaced
        self._lock = _locked(self._folder, prefix)  # held until __exit__
        self._own = [*handler.sequences, *([MASK] if handler.has_mask else [])]
        self._writers = {name: IndexedWriter(self._folder / name, np.int32) for name in self._own}
        self._files: dict[str, str] = {}  # column -> name in file names
        self._rejected = new_file(
            self._folder / "rejected", encoding="utf-8", errors="backslashreplace"
        )
        self.num_rows = 0

    def __enter__(self) -> PromptSetWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._rejected.close()
        if not (self._folder / MOVES).exists():
            shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def add(self, chunk: EncodedChunk) -> None:
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
        """Add the rows of another data set; columns: all that it has, by their file names."""
        for file, reader in columns.items():
            if file not in self._writers:
                self._writers[file] = IndexedWriter(self._folder / file, reader.dtype.type)
            for place in range(len(reader)):
                sequence = reader[place]
                self._writers[file].add(sequence.tobytes(), [len(sequence)])

    def append_rejected(self, file: Path) -> None:
        """Add the lines of another data set's rejected rows."""
        with open_plain(file) as lines:
            text = io.TextIOWrapper(lines, encoding="utf-8", errors="backslashreplace")
            shutil.copyfileobj(text, self._rejected)

    def commit(self, sidecar: Sidecar, has_rejected: bool) -> None:
        """Puts the files in place of those of an older data set, the sidecar last."""
        for writer in self._writers.values():
            writer.close()
        self._rejected.close()
        text = sidecar.json_text().encode("utf-8", "backslashreplace")  # half characters of names
        replace_file(self._folder / "meta", text)
        moves = [("rejected", rejected_path(self._prefix).name)] if has_rejected else []
        for name in reversed(self._writers):  # the prompts' index last: without it there is no set
            for ending in (".bin", ".idx"):
                moves.append((f"{name}{ending}", _part(self._prefix, name, ending).name))
        moves.append(("meta", sidecar_path(self._prefix).name))
        replace_file(self._folder / f"{MOVES}.new", json.dumps(moves))
        (self._folder / f"{MOVES}.new").rename(self._folder / MOVES)
        _make_moves(self._folder, self._prefix)

    def columns(self) -> list[Column]:
        """Every indexed data set that was written, for the sidecar."""
        own = [
            Column(name=name, file=name, dtype="int32", encoding=_encoding(name))
            for name in self._own
        ]
        return own + [
            Column(name=name, file=file, dtype="uint8", encoding="json")
            for name, file in self._files.items()
        ]

    def _start_column(self, name: str) -> None:
        if len(self._files) == MAX_COLUMNS:
            raise UserError(
                Problem(
                    "rows",
                    f"must have at most {MAX_COLUMNS} different columns, {name!r} is one more",
                    remedy="put what differs from row to row into one nested column",
                )
            )
        self._files[name] = file_name(name, set(self._writers))
        writer = IndexedWriter(self._folder / self._files[name], np.uint8)
        _add_values(writer, [None] * self.num_rows)
        self._writers[self._files[name]] = writer


def _add_values(writer: IndexedWriter, values: Sequence[bytes | None]) -> None:
    whole = [b"null" if value is None else value for value in values]
    writer.add(b"".join(whole), [len(value) for value in whole])


def _part(prefix: Path, column: str, ending: str) -> Path:
    path = data_path(prefix, column)
    return path.with_name(path.name + ending)


def _encoding(name: str) -> Literal["token_ids", "labels", "mask"]:
    if name == MASK:
        return "mask"
    return "token_ids" if name.endswith(TOKEN_IDS) else "labels"


def _make_moves(folder: Path, prefix: Path) -> None:
    """Removes the older data set and makes the moves that were not made yet."""
    moves = [(folder / name, prefix.with_name(to)) for name, to in _moves(folder)]
    made = {target for source, target in moves if not source.exists()}
    for file in existing_files(prefix):
        if file not in made:
            file.unlink()
    for source, target in moves:
        if target not in made:
            source.rename(target)
    (folder / MOVES).unlink()


def _moves(folder: Path) -> list[list[str]]:
    with open_file(folder / MOVES, "r", encoding="ascii") as stream:
        moves: list[list[str]] = json.load(stream)
    names = [name for move in moves for name in move]
    if not all(is_plain_path(name) and "/" not in name for name in names):
        raise OSError(errno.EINVAL, "its list of moves names files elsewhere", str(folder / MOVES))
    return moves


def not_new(output_prefix: str, found: str) -> Problem:
    """A data set is in the way."""
    return Problem(
        PREFIX,
        f"must be new, {found} exists",
        output_prefix,
        "take another prefix or give --overwrite",
    )


def not_written(output_prefix: str, error: OSError) -> Problem:
    """What the disk refuses."""
    return Problem(
        PREFIX,
        f"cannot be written: {error.strerror or error}",
        output_prefix,
        "check the folder, its rights and the space on the disk",
    )


def _locked(folder: Path, prefix: Path) -> IO[str]:
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"{folder.name} is a link; remove it", str(folder))
    lock = open_file(folder / "lock", "w", None)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise UserError(
            Problem(
                PREFIX,
                "must have one writer, another process is writing it",
                prefix,
                "wait for it or take another prefix",
            )
        ) from error
    return lock
