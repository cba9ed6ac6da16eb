"""Writes an indexed prompt data set beside its final names and moves it there when it is whole."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import numpy as np

from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.data.indexed import IndexedWriter
from mindspeed_rlxf.data.row_encoder import EncodedChunk
from mindspeed_rlxf.data.sidecar import (
    MASK,
    TOKEN_IDS,
    Column,
    Sidecar,
    column_files,
    data_path,
    file_name,
    rejected_path,
    sidecar_path,
)

MAX_COLUMNS = 256  # each holds a file open


def existing_files(prefix: Path) -> list[Path]:
    """Files of a data set under this prefix, the sidecar first, the index of the prompts next.

    In this order a removal that is interrupted leaves nothing that could be taken for a data set.
    """
    columns = sorted(column_files(prefix), key=lambda name: name != TOKEN_IDS)
    parts = [_part(prefix, name, ending) for name in columns for ending in (".idx", ".bin")]
    return [f for f in (sidecar_path(prefix), *parts, rejected_path(prefix)) if f.exists()]


class PromptSetWriter:
    """Use as a context: without `commit` nothing is left.

    Raises UserError when another process writes to the prefix, OSError when the disk refuses.
    """

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._folder = prefix.with_name(f".{prefix.name}_packed.partial")
        self._folder.mkdir(exist_ok=True)  # of a run that was killed: its files are written over
        self._lock = open(self._folder / "lock", "w")  # noqa: SIM115  # held until __exit__
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"--output-prefix={prefix} must have one writer, another process is writing it; "
                "wait for it or take another prefix"
            ) from error
        self._writers = {
            TOKEN_IDS: IndexedWriter(self._folder / TOKEN_IDS, np.int32),
            MASK: IndexedWriter(self._folder / MASK, np.int32),
        }
        self._files: dict[str, str] = {}  # column -> name in file names
        self._rejected = open(  # noqa: SIM115
            self._folder / "rejected", "w", encoding="utf-8", errors="backslashreplace"
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
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def add(self, chunk: EncodedChunk) -> None:
        self._writers[TOKEN_IDS].add(chunk.token_ids, chunk.lengths)
        ones = np.ones(sum(chunk.lengths), dtype=np.int32)
        self._writers[MASK].add(ones.tobytes(), chunk.lengths)
        for name in chunk.columns:
            if name not in self._files:
                self._start_column(name)
        for name, file in self._files.items():
            values = chunk.columns.get(name) or [None] * len(chunk.lengths)
            _add_values(self._writers[file], values)
        for reject in chunk.rejected:
            self._rejected.write(json.dumps(asdict(reject), ensure_ascii=False) + "\n")
        self.num_rows += len(chunk.lengths)

    def commit(self, sidecar: Sidecar, has_rejected: bool) -> None:
        """Puts the files in place of those of an older data set, the sidecar last."""
        for writer in self._writers.values():
            writer.close()
        self._rejected.close()
        text = sidecar.json_text().encode("utf-8", "backslashreplace")  # half characters of names
        (self._folder / "meta").write_bytes(text)
        for file in existing_files(self._prefix):
            file.unlink()
        if has_rejected:
            (self._folder / "rejected").rename(rejected_path(self._prefix))
        for name in reversed(self._writers):  # the prompts' index last: without it there is no set
            for ending in (".bin", ".idx"):
                (self._folder / f"{name}{ending}").rename(_part(self._prefix, name, ending))
        (self._folder / "meta").rename(sidecar_path(self._prefix))

    def columns(self) -> list[Column]:
        """Every indexed data set that was written, for the sidecar."""
        own = [
            Column(name=TOKEN_IDS, file=TOKEN_IDS, dtype="int32", encoding="token_ids"),
            Column(name=MASK, file=MASK, dtype="int32", encoding="mask"),
        ]
        return own + [
            Column(name=name, file=file, dtype="uint8", encoding="json")
            for name, file in self._files.items()
        ]

    def _start_column(self, name: str) -> None:
        if len(self._files) == MAX_COLUMNS:
            raise UserError(
                f"rows must have at most {MAX_COLUMNS} different columns, {name!r} is one more; "
                "put what differs from row to row into one nested column"
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
