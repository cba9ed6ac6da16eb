"""Write an indexed data set, published once complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import numpy as np

from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.data.indexed_prompts import IndexedWriter
from mindspeed_rlxf.data.preprocessing.row_encoder import EncodedChunk, to_json
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


def existing_files(prefix: Path) -> list[Path]:
    """List a data set's existing files in removal order: sidecar, columns, rejected rows.

    The token ids come first among the columns: without their .idx the rest is no data set.
    """
    columns = sorted(column_files(prefix), key=lambda name: not name.endswith(TOKEN_IDS))
    files = [sidecar_path(prefix)]
    for column in columns:
        path = data_path(prefix, column)
        files += [Path(f"{path}.idx"), Path(f"{path}.bin")]
    files.append(rejected_path(prefix))
    return [file for file in files if file.exists()]


@contextmanager
def partial_folder(prefix: Path) -> Iterator[Path]:
    """Yield an empty folder for a data set's files, removed at the end.

    Raises UserError for an OSError in the block.
    """
    folder = prefix.with_name(f".{prefix.name}_packed.partial")
    try:
        shutil.rmtree(folder, ignore_errors=True)  # from a killed run
        folder.mkdir(parents=True)
        yield folder
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        remedy = "check the folder, its rights and the space on the disk"
        raise UserError(Problem("--output-prefix", rule, str(prefix), remedy)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class PromptSetWriter:
    """Writes one data set to a partial folder; `commit` publishes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The mask is all ones, as in the older toolkit.
        self._writers = {name: IndexedWriter(folder / name, np.int32) for name in (TOKEN_IDS, MASK)}
        self._files: dict[str, str] = {}  # column -> its name in files
        self._num_rows = 0

    def add(self, chunk: EncodedChunk) -> None:
        """Write a chunk: token ids, mask (all 1), columns, rejected rows as JSON lines.

        Rows get null for columns missing from their chunk or first seen in a later one.
        """
        lengths = [len(ids) for ids in chunk.token_ids]
        ids = np.asarray(list(chain(*chunk.token_ids)), dtype=np.int32)
        self._writers[TOKEN_IDS].add(ids.tobytes(), lengths)
        self._writers[MASK].add(np.ones_like(ids).tobytes(), lengths)
        for name in chunk.columns:
            if name not in self._files:
                file = file_name(name, set(self._writers))
                self._files[name] = file
                self._writers[file] = IndexedWriter(self._folder / file, np.uint8)
                self._writers[file].add(b"null" * self._num_rows, [len(b"null")] * self._num_rows)
        for name, file in self._files.items():
            column = chunk.columns.get(name) or [None] * len(lengths)
            values = [value or b"null" for value in column]
            self._writers[file].add(b"".join(values), [len(value) for value in values])
        with (self._folder / "rejected").open("ab") as stream:
            for reject in chunk.rejected:
                line = {**asdict(reject), "problem": str(reject.problem)}
                stream.write(to_json(line) + b"\n")
        self._num_rows += len(lengths)

    def commit(self, prefix: Path, sidecar: Sidecar, has_rejected: bool) -> None:
        """Flush the files, remove an older set's, and move the new ones, the sidecar last.

        Publishes the rejected rows only if `has_rejected`.
        """
        moves = {self._folder / "rejected": rejected_path(prefix)} if has_rejected else {}
        for name in reversed(self._writers):  # the prompts' index last
            self._writers[name].close()
            for ending in (".bin", ".idx"):
                moves[self._folder / f"{name}{ending}"] = Path(f"{data_path(prefix, name)}{ending}")
        moves[self._folder / "meta"] = sidecar_path(prefix)
        text = json.dumps(sidecar.model_dump(mode="json"), ensure_ascii=False, indent=1) + "\n"
        # A column's name may have half a character, which UTF-8 cannot encode.
        (self._folder / "meta").write_bytes(text.encode("utf-8", "backslashreplace"))
        for source in moves:
            with source.open("rb") as stream:
                os.fsync(stream.fileno())
        for file in existing_files(prefix):
            file.unlink()
        for source, target in moves.items():
            source.rename(target)

    def columns(self) -> list[Column]:
        """Describe every written column, for the sidecar."""
        return [
            Column(name=TOKEN_IDS, file=TOKEN_IDS, dtype="int32", encoding="token_ids"),
            Column(name=MASK, file=MASK, dtype="int32", encoding="mask"),
            *(
                Column(name=name, file=file, dtype="uint8", encoding="json")
                for name, file in self._files.items()
            ),
        ]
