"""Merge the indexed data sets of a folder into one (`--merge-group-keys`).

Sets that `preprocess_data.py` wrote have a sidecar. They must be made alike, and the merged set has
a sidecar too, with the sum of their counts. Sets of the older toolkit are merged column by column.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.data.handlers import HANDLERS
from mindspeed_rlxf.data.indexed import BrokenIndex, IndexedReader, IndexedWriter
from mindspeed_rlxf.data.preprocessing.writer import (
    PromptSetWriter,
    existing_files,
    exists_problem,
    report_write_errors,
)
from mindspeed_rlxf.data.sidecar import Sidecar, data_path, read_sidecar, rejected_path

KEYS = "--merge-group-keys"
SIDECAR_ENDING = "_packed_meta.json"

Readers = dict[Path, IndexedReader]
"""Path without ending -> data set, in the order of their names."""


@dataclass(frozen=True)
class OwnSet:
    """A data set with a sidecar, as this package writes it.

    prefix:  as in data.data_path
    readers: opened columns by the names in their file names; columns without files are absent
    """

    prefix: Path
    sidecar: Sidecar
    readers: dict[str, IndexedReader]


def merge(
    folder: str, keys: Sequence[str], output_prefix: str, overwrite: bool = False
) -> dict[str, int]:
    """Write `{output_prefix}_{key}.bin/.idx` from all .bin/.idx pairs whose name contains the key.

    The pairs are those in `folder`, concatenated in the order of their names. If some belong to
    sets with a sidecar, all must; then whole sets are merged and the output has a sidecar.
    Returns output path without ending -> number of sequences. Raises UserError where `folder` is no
    folder, a key has no pairs, sets are incomplete or differ, an output exists (without
    `overwrite`), or writing fails.
    """
    if Path(output_prefix).name in ("", ".."):
        rule = "must end with the beginning of a file's name"
        raise UserError(Problem("--output-prefix", rule, output_prefix, "give FOLDER/NAME"))
    # So that own output is known in any spelling. (Path.resolve raises for links in a circle.)
    source, prefix = Path(os.path.realpath(folder)), Path(output_prefix).absolute()
    prefix = Path(os.path.realpath(prefix.parent)) / prefix.name
    if not source.is_dir():
        rule = "with --merge-group-keys it must be one folder"
        raise UserError(_problem(f"--input {folder}", rule, "name it"))
    problems: list[Problem] = []
    groups: dict[str, Readers] = {}
    for key in keys:
        output = prefix.with_name(f"{prefix.name}_{key}")
        groups[key], key_problems = _open_pairs(source, key, output)
        problems += key_problems
        if Path(f"{output}.idx").exists() and not overwrite:
            problems.append(exists_problem(output_prefix, f"{output.name}.idx"))
    own = _find_own_prefixes(source, groups)
    if own and not overwrite and not problems:
        problems += [exists_problem(output_prefix, f.name) for f in existing_files(prefix)[:1]]
    if problems:
        raise UserError(problems)
    with report_write_errors(output_prefix):
        if own:
            _merge_own(own, groups, prefix)
        else:
            _check_lengths(groups)
            prefix.parent.mkdir(parents=True, exist_ok=True)
            for key, readers in groups.items():
                _write_pair(prefix.with_name(f"{prefix.name}_{key}"), readers)
    shown = Path(output_prefix)
    return {
        str(shown.with_name(f"{shown.name}_{key}")): sum(map(len, readers.values()))
        for key, readers in groups.items()
    }


def _open_pairs(folder: Path, key: str, output: Path) -> tuple[Readers, list[Problem]]:
    """Open the .bin/.idx pairs whose name contains `key`, except `output`; sorted by name.

    Returns (path without ending -> reader, problems). Problems: no such pair, files that are
    missing or broken, several dtypes.
    """
    files = [f for f in folder.iterdir() if f.suffix in (".bin", ".idx") and f.is_file()]
    stems = sorted({f.with_suffix("") for f in files if key in f.stem} - {output})
    problems: list[Problem] = []
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
        there = ", ".join(sorted({f.stem for f in files})[:12]) or "no .bin and .idx files"
        rule = f"{key!r} must be in the name of a file of {folder} (there are {there})"
        problems.append(_problem(KEYS, rule, "correct the key"))
    kinds = sorted({str(reader.dtype) for reader in readers.values()})
    if len(kinds) > 1:
        rule = f"the sets of {key!r} must be of one type, they are {' and '.join(kinds)}"
        problems.append(_problem(KEYS, rule, "merge those of one type"))
    return readers, problems


def _check_lengths(groups: Mapping[str, Readers]) -> None:
    lengths = {key: [len(reader) for reader in readers.values()] for key, readers in groups.items()}
    if any(other != lengths[next(iter(lengths))] for other in lengths.values()):
        found = ", ".join(f"{key} {'+'.join(map(str, n))}" for key, n in lengths.items())
        rule = f"columns of one data set must have equally many sequences ({found})"
        raise UserError(_problem(KEYS, rule, "merge what belongs together"))


def _write_pair(output: Path, readers: Readers) -> None:
    """Write the sequences of all readers, one after the other, to `{output}.bin/.idx`.

    Writes to partial files, and once they are complete removes an older .idx and moves them in its
    place, the .idx last. The partial files are removed after an error.
    """
    partial = output.with_name(f".{output.name}.partial")
    writer = IndexedWriter(partial, next(iter(readers.values())).dtype.type)
    try:
        for path in readers:
            writer.add_set(path)
        writer.close()
        output.with_name(f"{output.name}.idx").unlink(missing_ok=True)
        for ending in (".bin", ".idx"):
            shutil.move(f"{partial}{ending}", f"{output}{ending}")
    finally:
        for ending in (".bin", ".idx"):
            Path(f"{partial}{ending}").unlink(missing_ok=True)


def _find_own_prefixes(folder: Path, groups: Mapping[str, Readers]) -> list[Path]:
    names = {stem.name for readers in groups.values() for stem in readers}
    prefixes = (f.name[: -len(SIDECAR_ENDING)] for f in folder.glob(f"*{SIDECAR_ENDING}"))
    own = sorted(p for p in prefixes if any(n.startswith(f"{p}_packed_") for n in names))
    return [folder / prefix for prefix in own]


def _merge_own(prefixes: Sequence[Path], groups: Mapping[str, Readers], output: Path) -> None:
    """Merge sets with a sidecar into the set `output`, which replaces an older one once complete.

    Rows and rejected rows are in the order of the prefixes; the counts of the sidecars are added.
    Raises UserError with everything that differs or is missing, and OSError.
    """
    sets = _open_own(prefixes, groups)
    first = sets[0].sidecar
    has_rejected = False
    with PromptSetWriter(output, HANDLERS[first.handler]) as writer:
        for each in sets:
            writer.append(
                {c.file: data_path(each.prefix, c.file) for c in first.columns},
                {c.file: each.readers[c.file].dtype.type for c in first.columns},
            )
            if rejected_path(each.prefix).exists():
                writer.append_rejected(rejected_path(each.prefix))
                has_rejected = True
        counts = _add_counts([each.sidecar.counts for each in sets])
        writer.commit(first.model_copy(update={"counts": counts}), has_rejected)


def _open_own(prefixes: Sequence[Path], groups: Mapping[str, Readers]) -> list[OwnSet]:
    """Return the sets of `prefixes`, in order: sidecar and opened columns of each.

    Raises UserError with all problems of the first of these checks that fails: each set has a valid
    sidecar; every pair belongs to a set, the keys are exactly the columns, and the sets were made
    alike; the sets are complete.
    """
    readers = {stem: reader for group in groups.values() for stem, reader in group.items()}
    sets: list[OwnSet] = []
    problems: list[Problem] = []
    for prefix in prefixes:
        try:
            sidecar = read_sidecar(prefix)
        except UserError as error:
            problems += error.problems
            continue
        assert sidecar is not None, "its name was found"
        paths = {c.file: data_path(prefix, c.file) for c in sidecar.columns}
        found = {file: readers.pop(path) for file, path in paths.items() if path in readers}
        sets.append(OwnSet(prefix, sidecar, found))
    if problems:
        raise UserError(problems)
    rule = f"must have a sidecar, as {prefixes[0].name}{SIDECAR_ENDING}, there is none"
    problems = [_problem(stem, rule, "merge sets of one kind") for stem in sorted(readers)]
    problems += [*_find_differences(sets), *_key_problems(groups, sets[0].sidecar)]
    problems = problems or [problem for each in sets for problem in _find_damage(each)]
    if problems:
        raise UserError(problems)
    return sets


def _find_differences(sets: Sequence[OwnSet]) -> Iterator[Problem]:
    """Yield a problem for each property in `_describe_origin` that differs from the first set's.

    Also one if the first set's handler is unknown.
    """
    first = sets[0]
    remedy = f"train on data.data_path=[{','.join(str(each.prefix) for each in sets)}]"
    for each in sets[1:]:
        theirs = _describe_origin(each.sidecar)
        for name, ours in _describe_origin(first.sidecar).items():
            if ours != theirs[name]:
                yield _problem(
                    KEYS,
                    f"sets must be made alike, {name} of {first.prefix.name} is "
                    f"{_describe_value(ours, theirs[name])}, of {each.prefix.name} "
                    f"{_describe_value(theirs[name], ours)}",
                    f"preprocess them alike, or {remedy}",
                )
    if first.sidecar.handler not in HANDLERS:
        rule = f"handler {first.sidecar.handler!r} is not known here"
        yield _problem(first.prefix, rule, "write it again")


def _describe_origin(sidecar: Sidecar) -> dict[str, Any]:
    return {
        "handler": sidecar.handler,
        "template": sidecar.template,
        "allow_special_tokens": sidecar.allow_special_tokens,
        "stop_token_ids": sorted(sidecar.stop_token_ids),
        "tokenizer sha256": sidecar.tokenizer.sha256[:12],
        "columns": {f"{c.name!r} ({c.file}, {c.dtype}, {c.encoding})" for c in sidecar.columns},
    }


def _describe_value(value: Any, other: Any) -> str:
    if not isinstance(value, set):
        return str(value)
    return f"with {', '.join(sorted(value - other))}" if value - other else "without more"


def _key_problems(groups: Mapping[str, Readers], sidecar: Sidecar) -> Iterator[Problem]:
    keys = [f"packed_{column.file}_document" for column in sidecar.columns]
    if set(groups) != set(keys):
        rule = f"must name all columns of sets with {SIDECAR_ENDING}, it is {' '.join(groups)}"
        yield Problem(KEYS, rule, remedy=f"give {' '.join(keys)}")


def _find_damage(each: OwnSet) -> Iterator[Problem]:
    """Yield a problem for each column that is missing or of another dtype than the sidecar says.

    Also one if the columns differ in length.
    """
    rules = []
    for column in each.sidecar.columns:
        if column.file not in each.readers:
            path = data_path(each.prefix, column.file)
            rules.append(f"must be whole, there is no {path.name}.idx")
        elif str(each.readers[column.file].dtype) != column.dtype:
            kind = each.readers[column.file].dtype
            rules.append(f"{column.file} must be {column.dtype}, not {kind}")
    lengths = {file: len(reader) for file, reader in each.readers.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{file} {length}" for file, length in lengths.items())
        rules.append(f"columns must have equally many rows ({found})")
    yield from (_problem(each.prefix, rule, "write it again") for rule in rules)


def _problem(key: str | Path, rule: str, remedy: str) -> Problem:
    return Problem(f"{key}", rule, remedy=remedy, colon=True)


def _add_counts(all_counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for counts in all_counts:
        for name, value in counts.items():
            if isinstance(value, dict):
                total[name] = _add_counts([total.get(name, {}), value])
            else:
                total[name] = total.get(name, 0) + value
    return total
