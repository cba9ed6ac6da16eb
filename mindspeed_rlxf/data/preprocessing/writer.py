"""Write indexed data sets, of rows or by merging others; they appear once complete."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.data.handlers import Handler
from mindspeed_rlxf.data.indexed_prompts import BrokenIndex, IndexedReader, IndexedWriter
from mindspeed_rlxf.data.preprocessing.row_encoder import EncodedChunk, to_json
from mindspeed_rlxf.data.sidecar import (
    MASK,
    TOKEN_IDS,
    Column,
    Encoding,
    Sidecar,
    column_files,
    data_path,
    file_name,
    read_sidecar,
    rejected_path,
    sidecar_path,
)

PREFIX = "--output-prefix"
KEYS = "--merge-group-keys"
SIDECAR_ENDING = "_packed_meta.json"

Readers = dict[Path, IndexedReader]
"""Path without ending -> data set, in the order of their names."""


def existing_files(prefix: Path) -> list[Path]:
    """List the existing files of a data set: sidecar, columns, rejected rows.

    In the order of removal: without the .idx of the token ids the other files are no data set.
    """
    columns = sorted(column_files(prefix), key=lambda name: not name.endswith(TOKEN_IDS))
    parts = [
        Path(f"{data_path(prefix, c)}{ending}") for c in columns for ending in (".idx", ".bin")
    ]
    return [f for f in (sidecar_path(prefix), *parts, rejected_path(prefix)) if f.exists()]


@contextmanager
def partial_folder(prefix: Path, shown: str) -> Iterator[Path]:
    """Yield an empty folder for the files of a data set, which is removed at the end.

    Raises UserError for an OSError in the block. shown: the prefix as the user gave it
    """
    folder = prefix.with_name(f".{prefix.name}_packed.partial")
    try:
        shutil.rmtree(folder, ignore_errors=True)  # of a killed run
        folder.mkdir(parents=True)
        yield folder
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        remedy = "check the folder, its rights and the space on the disk"
        raise UserError(Problem(PREFIX, rule, shown, remedy)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
    """Writes one data set to a partial folder; `commit` publishes it."""

    def __init__(self, folder: Path, handler: Handler) -> None:
        self._folder, self._handler = folder, handler
        # A column of ones beside the ids, as the older toolkit wrote.
        self._own = [*handler.sequences, *([MASK] if TOKEN_IDS in handler.sequences else [])]
        self._writers = {name: IndexedWriter(folder / name, np.int32) for name in self._own}
        self._files: dict[str, str] = {}  # column -> name in file names
        self._num_rows = 0

    def add(self, chunk: EncodedChunk) -> None:
        """Write a chunk: token sequences, mask (all 1, if the handler has one), columns, rejects.

        A column that earlier chunks lack gets null for their rows, and so does one that this chunk
        lacks. Rejected rows are lines of JSON.
        """
        for name in self._handler.sequences:
            self._writers[name].add(*chunk.sequences[name])
        if MASK in self._own:
            lengths = chunk.sequences[TOKEN_IDS][1]
            self._writers[MASK].add(np.ones(sum(lengths), dtype=np.int32).tobytes(), lengths)
        for name in [name for name in chunk.columns if name not in self._files]:
            file = self._files[name] = file_name(name, set(self._writers))
            self._writers[file] = IndexedWriter(self._folder / file, np.uint8)
            self._writers[file].add(b"null" * self._num_rows, [len(b"null")] * self._num_rows)
        for name, file in self._files.items():
            values = [v or b"null" for v in chunk.columns.get(name) or [None] * chunk.num_rows]
            self._writers[file].add(b"".join(values), [len(value) for value in values])
        with (self._folder / "rejected").open("ab") as stream:
            for reject in chunk.rejected:
                line = {**asdict(reject), "problem": str(reject.problem)}
                stream.write(to_json(line) + b"\n")
        self._num_rows += chunk.num_rows

    def commit(self, prefix: Path, sidecar: Sidecar, has_rejected: bool) -> None:
        """Close and flush the files, and move them over those of an older set, the sidecar last.

        The file of rejected rows is published too if `has_rejected`.
        """
        moves = {self._folder / "rejected": rejected_path(prefix)} if has_rejected else {}
        for name in reversed(self._writers):  # the prompts' index last
            self._writers[name].close()
            for ending in (".bin", ".idx"):
                moves[self._folder / f"{name}{ending}"] = Path(f"{data_path(prefix, name)}{ending}")
        moves[self._folder / "meta"] = sidecar_path(prefix)
        (self._folder / "meta").write_bytes(sidecar.as_bytes())
        publish(moves, existing_files(prefix))

    def columns(self) -> list[Column]:
        """Describe every column that was written, for the sidecar."""
        found = []
        for name in self._own:
            is_ids, is_mask = name.endswith(TOKEN_IDS), name == MASK
            kind: Encoding = "mask" if is_mask else "token_ids" if is_ids else "labels"
            found.append(Column(name=name, file=name, dtype="int32", encoding=kind))
        others = self._files.items()
        return found + [Column(name=n, file=f, dtype="uint8", encoding="json") for n, f in others]


def exists_problem(output_prefix: str, name: str) -> Problem:
    """Make the problem that `output_prefix` must be new, but its file `name` exists."""
    remedy = "take another prefix or give --overwrite"
    return Problem(PREFIX, f"must be new, {name} exists", output_prefix, remedy)


def merge(
    folder: str, keys: Sequence[str], output_prefix: str, overwrite: bool = False
) -> dict[str, int]:
    """Write `{output_prefix}_{key}.bin/.idx` from all .bin/.idx pairs whose name contains the key.

    The pairs are those in `folder`, concatenated in the order of their names. If some belong to
    sets with a sidecar, all must; then whole sets are merged and the output has a sidecar.

    Returns:
        Output path without ending -> number of sequences.

    Raises:
        UserError: `folder` is no folder, a key has no pairs, sets are incomplete or differ, an
            output exists (without `overwrite`), or writing fails.
    """
    if not Path(output_prefix).name:
        rule = "must end with the beginning of a file's name"
        raise UserError(Problem(PREFIX, rule, output_prefix, "give FOLDER/NAME"))
    source, prefix = Path(folder).resolve(), Path(output_prefix).resolve()
    if not source.is_dir():
        rule = "with --merge-group-keys it must be one folder"
        raise UserError(_problem(f"--input {folder}", rule, "name it"))
    problems: list[Problem] = []
    outputs = {key: prefix.with_name(f"{prefix.name}_{key}") for key in keys}
    groups = {key: _open_pairs(source, key, outputs[key], problems) for key in keys}
    stems = {stem for readers in groups.values() for stem in readers}
    prefixes = [
        Path(str(f).removesuffix(SIDECAR_ENDING)) for f in source.glob(f"*{SIDECAR_ENDING}")
    ]
    own = sorted(p for p in prefixes if any(f"{s}".startswith(f"{p}_packed_") for s in stems))
    indices = [Path(f"{output}.idx") for output in outputs.values()]
    existing = [f for f in (*indices, *(existing_files(prefix) if own else [])) if f.exists()]
    if existing and not overwrite:
        problems.append(exists_problem(output_prefix, existing[0].name))
    if problems:
        raise UserError(problems)
    sidecar = _merge_sidecars(own, groups) if own else None
    lengths = {key: [len(reader) for reader in readers.values()] for key, readers in groups.items()}
    if any(other != lengths[keys[0]] for other in lengths.values()):
        found = ", ".join(f"{key} {'+'.join(map(str, n))}" for key, n in lengths.items())
        rule = f"columns of one data set must have equally many sequences ({found})"
        raise UserError(_problem(KEYS, rule, "merge what belongs together"))
    moves: dict[Path, Path] = {}
    with partial_folder(prefix, output_prefix) as made:
        for key, readers in groups.items():
            writer = IndexedWriter(made / key, next(iter(readers.values())).dtype.type)
            for path in readers:
                writer.add_set(path)
            writer.close()
            for ending in (".bin", ".idx"):
                moves[made / f"{key}{ending}"] = Path(f"{outputs[key]}{ending}")
        older = [path for path in moves.values() if path.exists()]
        if sidecar is not None:
            older = existing_files(prefix)
            if rejected := [f for f in map(rejected_path, own) if f.exists()]:
                moves[made / "rejected"] = rejected_path(prefix)
                (made / "rejected").write_bytes(b"".join(f.read_bytes() for f in rejected))
            moves[made / "meta"] = sidecar_path(prefix)
            (made / "meta").write_bytes(sidecar.as_bytes())
        publish(moves, older)
    shown = Path(output_prefix)
    return {str(shown.with_name(f"{shown.name}_{key}")): sum(n) for key, n in lengths.items()}


def _open_pairs(folder: Path, key: str, output: Path, problems: list[Problem]) -> Readers:
    """Open the .bin/.idx pairs whose name contains `key`, except `output`; sorted by name.

    Adds to `problems`: no such pair, files that are missing or broken, several dtypes.
    """
    there = {f.with_suffix("") for f in folder.iterdir() if f.suffix in (".bin", ".idx")}
    stems = sorted({stem for stem in there if key in stem.name} - {output})
    readers: Readers = {}
    for stem in stems:
        try:
            readers[stem] = IndexedReader(stem)
        except FileNotFoundError as error:
            rule = f"must be a pair, there is no {Path(error.filename).name}"
            problems.append(_problem(stem, rule, "complete or remove it"))
        except (BrokenIndex, OSError) as error:
            problems.append(
                _problem(stem, f"must be whole, {error}", "write it again or remove it")
            )
    if not stems:
        found = ", ".join(sorted(s.name for s in there)[:12]) or "no .bin and .idx files"
        rule = f"{key!r} must be in the name of a file of {folder} (there are {found})"
        problems.append(_problem(KEYS, rule, "correct the key"))
    kinds = sorted({str(reader.dtype) for reader in readers.values()})
    if len(kinds) > 1:
        rule = f"the sets of {key!r} must be of one type, they are {' and '.join(kinds)}"
        problems.append(_problem(KEYS, rule, "merge those of one type"))
    return readers


def _merge_sidecars(prefixes: Sequence[Path], groups: Mapping[str, Readers]) -> Sidecar:
    """Return the sidecar of the merged set, with the sums of the counts.

    Raises UserError unless the pairs are whole sets that were made alike, and the keys their
    columns.
    """
    sidecars = [s for s in map(read_sidecar, prefixes) if s is not None]
    first, name = sidecars[0], prefixes[0].name
    pairs = list(zip(prefixes, sidecars, strict=True))
    columns = [data_path(prefix, c.file) for prefix, sidecar in pairs for c in sidecar.columns]
    stems = {stem for readers in groups.values() for stem in readers}
    rule = f"must have a sidecar, as {name}{SIDECAR_ENDING}, there is none"
    problems = [
        _problem(stem, rule, "merge sets of one kind") for stem in sorted(stems - {*columns})
    ]
    sets = f"data.data_path=[{','.join(map(str, prefixes))}]"
    for prefix, sidecar in pairs:
        ours, theirs = (_describe_origin(each) for each in (first, sidecar))
        for key in [key for key in ours if ours[key] != theirs[key]]:
            found = f"{key} of {name} is {ours[key]}, of {prefix.name} {theirs[key]}"
            rule, remedy = f"sets must be made alike, {found}", "preprocess them alike, or train on"
            problems.append(_problem(KEYS, rule, f"{remedy} {sets}"))
    keys = [f"packed_{column.file}_document" for column in first.columns]
    if set(groups) != set(keys):
        rule = f"must name all columns of sets with {SIDECAR_ENDING}, it is {' '.join(groups)}"
        problems.append(Problem(KEYS, rule, remedy=f"give {' '.join(keys)}"))
    problems = problems or [
        _problem(path, f"must be whole, there is no {path.name}.idx", "write the set again")
        for path in columns
        if path not in stems
    ]
    if problems:
        raise UserError(problems)
    total, dropped = Counter[str](), Counter[str]()
    for each in sidecars:
        total.update({n: v for n, v in each.counts.items() if isinstance(v, int)})
        dropped.update(cast("dict[str, int]", each.counts.get("dropped", {})))
    return first.model_copy(update={"counts": {**total, "dropped": dict(dropped)}})


def _describe_origin(sidecar: Sidecar) -> dict[str, Any]:
    columns = [f"{c.name} ({c.file}, {c.dtype}, {c.encoding})" for c in sidecar.columns]
    return {
        **sidecar.model_dump(include={"handler", "template", "allow_special_tokens"}),
        "stop_token_ids": sorted(sidecar.stop_token_ids),
        "tokenizer sha256": sidecar.tokenizer.sha256[:12],
        "columns": sorted(columns),
    }


def _problem(key: str | Path, rule: str, remedy: str) -> Problem:
    return Problem(f"{key}", rule, remedy=remedy, colon=True)
