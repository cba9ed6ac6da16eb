"""Write an indexed data set to a partial folder, and move it to its final names once complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.data.handlers import Handler
from mindspeed_rlxf.data.indexed import IndexedWriter
from mindspeed_rlxf.data.preprocessing.row_encoder import EncodedChunk
from mindspeed_rlxf.data.sidecar import (
    MASK,
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

PREFIX = "--output-prefix"


def existing_files(prefix: Path) -> list[Path]:
    """List the existing files of this prefix's data set: sidecar, columns, rejected rows.

    They are in the order of removal: the sidecar, then of each column the .idx file first, columns
    of token ids before others. Without the .idx of the token ids the other files are no data set.
    """
    columns = sorted(column_files(prefix), key=lambda name: not name.endswith(TOKEN_IDS))
    parts = [
        Path(f"{data_path(prefix, c)}{ending}") for c in columns for ending in (".idx", ".bin")
    ]
    return [f for f in (sidecar_path(prefix), *parts, rejected_path(prefix)) if f.exists()]


def publish(moves: Mapping[Path, Path], older: Iterable[Path]) -> None:
    """Flush complete files, remove those of an older data set, and move the new ones in order."""
    for source in moves:
        with source.open("rb") as stream:
            os.fsync(stream.fileno())
    for file in older:
        file.unlink()
    for source, target in moves.items():
        source.rename(target)


class PromptSetWriter:
    """Writes one data set to a partial folder, which is removed at exit; `commit` publishes it."""

    def __init__(self, prefix: Path, handler: Handler) -> None:
        self._prefix, self._handler = prefix, handler
        self._folder = partial_folder(prefix)
        shutil.rmtree(self._folder, ignore_errors=True)  # of a killed run
        self._folder.mkdir(parents=True)
        self._own = [*handler.sequences, *([MASK] if handler.has_mask else [])]
        self._writers = {name: IndexedWriter(self._folder / name, np.int32) for name in self._own}
        self._files: dict[str, str] = {}  # column -> name in file names
        self._rejected = open(  # noqa: SIM115 - closed by commit and __exit__
            self._folder / "rejected", "w", encoding="utf-8", errors="backslashreplace"
        )
        self._num_rows = 0

    def __enter__(self) -> PromptSetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._rejected.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, chunk: EncodedChunk) -> None:
        """Write a chunk: token sequences, mask (all 1, if the handler has one), columns, rejects.

        A column that earlier chunks lack gets null for their rows, and so does one that this chunk
        lacks. Rejected rows are lines of JSON.
        """
        for name in self._handler.sequences:
            self._writers[name].add(*chunk.sequences[name])
        if self._handler.has_mask:
            lengths = chunk.sequences[TOKEN_IDS][1]
            self._writers[MASK].add(np.ones(sum(lengths), dtype=np.int32).tobytes(), lengths)
        for name in [name for name in chunk.columns if name not in self._files]:
            file = self._files[name] = file_name(name, set(self._writers))
            self._writers[file] = IndexedWriter(self._folder / file, np.uint8)
            _add_values(self._writers[file], [None] * self._num_rows)
        for name, file in self._files.items():
            values = chunk.columns.get(name) or [None] * chunk.num_rows
            _add_values(self._writers[file], values)
        for reject in chunk.rejected:
            line = {**asdict(reject), "problem": str(reject.problem)}
            self._rejected.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._num_rows += chunk.num_rows

    def commit(self, sidecar: Sidecar, has_rejected: bool) -> None:
        """Publish the data set: close and flush its files, and move them over an older one's.

        The sidecar is moved last. has_rejected: publish the file of rejected rows too
        """
        self._rejected.close()
        moves = {self._folder / "rejected": rejected_path(self._prefix)} if has_rejected else {}
        for name in reversed(self._writers):  # the prompts' index last
            self._writers[name].close()
            for ending in (".bin", ".idx"):
                final = Path(f"{data_path(self._prefix, name)}{ending}")
                moves[self._folder / f"{name}{ending}"] = final
        moves[self._folder / "meta"] = sidecar_path(self._prefix)
        (self._folder / "meta").write_bytes(sidecar.as_bytes())
        publish(moves, existing_files(self._prefix))

    def columns(self) -> list[Column]:
        """Describe every column that was written, for the sidecar."""
        own = [Column(name=n, file=n, dtype="int32", encoding=_encoding(n)) for n in self._own]
        others = self._files.items()
        return own + [Column(name=n, file=f, dtype="uint8", encoding="json") for n, f in others]


def _add_values(writer: IndexedWriter, values: Sequence[bytes | None]) -> None:
    whole = [b"null" if value is None else value for value in values]
    writer.add(b"".join(whole), [len(value) for value in whole])


def _encoding(name: str) -> Literal["token_ids", "labels", "mask"]:
    if name == MASK:
        return "mask"
    return "token_ids" if name.endswith(TOKEN_IDS) else "labels"


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
