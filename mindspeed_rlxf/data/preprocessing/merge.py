"""Merge the indexed data sets of a folder into one (`--merge-group-keys`).

Sets that `preprocess_data.py` wrote have a sidecar. They must be made alike, and the merged set has
a sidecar too, with the sum of their counts. Sets of the older toolkit are merged column by column.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.data.indexed import BrokenIndex, IndexedReader, IndexedWriter
from mindspeed_rlxf.data.preprocessing.writer import (
    existing_files,
    exists_problem,
    publish,
    report_write_errors,
)
from mindspeed_rlxf.data.sidecar import (
    Sidecar,
    data_path,
    partial_folder,
    read_sidecar,
    rejected_path,
    sidecar_path,
)

KEYS = "--merge-group-keys"
SIDECAR_ENDING = "_packed_meta.json"

Readers = dict[Path, IndexedReader]
"""Path without ending -> data set, in the order of their names."""


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
        raise UserError(Problem("--output-prefix", rule, output_prefix, "give FOLDER/NAME"))
    source, prefix = Path(folder).resolve(), Path(output_prefix).resolve()
    if not source.is_dir():
        rule = "with --merge-group-keys it must be one folder"
        raise UserError(_problem(f"--input {folder}", rule, "name it"))
    problems: list[Problem] = []
    groups: dict[str, Readers] = {}
    for key in keys:
        output = prefix.with_name(f"{prefix.name}_{key}")
        groups[key] = _open_pairs(source, key, output, problems)
        if Path(f"{output}.idx").exists() and not overwrite:
            problems.append(exists_problem(output_prefix, f"{output.name}.idx"))
    stems = {stem for readers in groups.values() for stem in readers}
    prefixes = [
        Path(str(f).removesuffix(SIDECAR_ENDING)) for f in source.glob(f"*{SIDECAR_ENDING}")
    ]
    own = sorted(p for p in prefixes if any(f"{s}".startswith(f"{p}_packed_") for s in stems))
    if own and not overwrite and not problems:
        problems += [exists_problem(output_prefix, f.name) for f in existing_files(prefix)[:1]]
    if problems:
        raise UserError(problems)
    sidecar = _merge_sidecars(own, groups) if own else None
    lengths = {key: [len(reader) for reader in readers.values()] for key, readers in groups.items()}
    if any(other != lengths[keys[0]] for other in lengths.values()):
        found = ", ".join(f"{key} {'+'.join(map(str, n))}" for key, n in lengths.items())
        rule = f"columns of one data set must have equally many sequences ({found})"
        raise UserError(_problem(KEYS, rule, "merge what belongs together"))
    with report_write_errors(output_prefix):
        _write(groups, prefix, own, sidecar)
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
            rule = f"must be whole, {error}"
            problems.append(_problem(stem, rule, "write it again or remove it"))
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

    Raises UserError for an invalid sidecar, pairs of no set, keys that are not exactly the columns,
    sets that were not made alike, and columns without files.
    """
    sidecars = [s for s in map(read_sidecar, prefixes) if s is not None]
    first, *others = sidecars
    columns = [
        data_path(p, c.file) for p, s in zip(prefixes, sidecars, strict=True) for c in s.columns
    ]
    stems = {stem for readers in groups.values() for stem in readers}
    rule = f"must have a sidecar, as {prefixes[0].name}{SIDECAR_ENDING}, there is none"
    problems = [
        _problem(stem, rule, "merge sets of one kind") for stem in sorted(stems - {*columns})
    ]
    ours = _describe_origin(first)
    for prefix, sidecar in zip(prefixes[1:], others, strict=True):
        problems += [
            _problem(
                KEYS,
                f"sets must be made alike, {name} of {prefixes[0].name} is {ours[name]}, of "
                f"{prefix.name} {theirs}",
                "preprocess them alike, or train on "
                f"data.data_path=[{','.join(map(str, prefixes))}]",
            )
            for name, theirs in _describe_origin(sidecar).items()
            if theirs != ours[name]
        ]
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
    return first.model_copy(update={"counts": _add_counts([each.counts for each in sidecars])})


def _describe_origin(sidecar: Sidecar) -> dict[str, Any]:
    return {
        "handler": sidecar.handler,
        "template": sidecar.template,
        "allow_special_tokens": sidecar.allow_special_tokens,
        "stop_token_ids": sorted(sidecar.stop_token_ids),
        "tokenizer sha256": sidecar.tokenizer.sha256[:12],
        "columns": sorted(f"{c.name} ({c.file}, {c.dtype}, {c.encoding})" for c in sidecar.columns),
    }


def _add_counts(all_counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for counts in all_counts:
        for name, value in counts.items():
            before = total.get(name)
            if isinstance(value, dict):
                total[name] = _add_counts([before or {}, value])
            else:
                total[name] = (before or 0) + value
    return total


def _write(
    groups: Mapping[str, Readers], prefix: Path, own: Sequence[Path], sidecar: Sidecar | None
) -> None:
    """Write the merged columns to a partial folder, and move them over older ones once complete."""
    folder, moves = partial_folder(prefix), dict[Path, Path]()
    shutil.rmtree(folder, ignore_errors=True)  # of a killed run
    folder.mkdir(parents=True)
    try:
        for key, readers in groups.items():
            writer = IndexedWriter(folder / key, next(iter(readers.values())).dtype.type)
            for path in readers:
                writer.add_set(path)
            writer.close()
            for ending in (".bin", ".idx"):
                moves[folder / f"{key}{ending}"] = Path(f"{prefix}_{key}{ending}")
        older = [path for path in moves.values() if path.exists()]
        if sidecar is not None:
            older = existing_files(prefix)
            if rejected := [f for f in map(rejected_path, own) if f.exists()]:
                moves[folder / "rejected"] = rejected_path(prefix)
                (folder / "rejected").write_bytes(b"".join(f.read_bytes() for f in rejected))
            moves[folder / "meta"] = sidecar_path(prefix)
            (folder / "meta").write_bytes(sidecar.as_bytes())
        publish(moves, older)
    finally:
        shutil.rmtree(folder)


def _problem(key: str | Path, rule: str, remedy: str) -> Problem:
    return Problem(f"{key}", rule, remedy=remedy, colon=True)
