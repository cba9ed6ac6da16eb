"""`--merge-group-keys`: indexed data sets of a folder become one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.data.indexed import BrokenIndex, IndexedReader, IndexedWriter
from mindspeed_rlxf.data.preprocessing.merge_own import KEYS, in_the_way, merge_own, own_prefixes
from mindspeed_rlxf.data.preprocessing.writer import not_new, not_written


def merge(
    folder: str, keys: Sequence[str], output_prefix: str, overwrite: bool = False
) -> dict[str, int]:
    """Writes `{output_prefix}_{key}.bin/.idx` of all pairs in `folder` whose name holds the key.

    Pairs are taken in the order of their names. Of sets with a sidecar the merged one has one too.
    Returns output -> number of sequences. Raises UserError; then nothing is written.
    """
    place, prefix = Path(folder), Path(output_prefix).absolute()
    if not place.is_dir():
        raise UserError(
            Problem(
                f"--input {folder}",
                "with --merge-group-keys it must be one folder",
                remedy="name it",
                colon=True,
            )
        )
    problems: list[Problem] = []
    groups = {}
    for key in keys:
        groups[key], found = _pairs(place, key, prefix.with_name(f"{prefix.name}_{key}"))
        problems += found
        if prefix.with_name(f"{prefix.name}_{key}.idx").exists() and not overwrite:
            problems.append(not_new(output_prefix, f"{prefix.name}_{key}.idx"))
    own = own_prefixes(place, groups)
    if own and not overwrite and not problems and (in_way := in_the_way(prefix)):
        problems.append(not_new(output_prefix, in_way[0]))
    if problems:
        raise UserError(problems)
    sizes = {key: sum(len(reader) for _, reader in pairs) for key, pairs in groups.items()}
    try:
        if own:
            merge_own(own, groups, prefix)
        else:
            _check_lengths(groups)
            prefix.parent.mkdir(parents=True, exist_ok=True)
            for key, pairs in groups.items():
                _write(prefix.with_name(f"{prefix.name}_{key}"), pairs)
    except OSError as error:
        raise UserError(not_written(output_prefix, error)) from error
    return {f"{output_prefix}_{key}": size for key, size in sizes.items()}


def _pairs(
    folder: Path, key: str, output: Path
) -> tuple[list[tuple[Path, IndexedReader]], list[Problem]]:
    """The data sets (paths without ending) whose name holds `key`, and what is wrong with them."""
    files = [f for f in folder.iterdir() if f.suffix in (".bin", ".idx") and f.is_file()]
    stems = sorted({f.with_name(f.name[:-4]) for f in files if key in f.name[:-4]} - {output})
    problems, pairs = [], []
    for stem in stems:
        try:
            pairs.append((stem, IndexedReader(stem)))
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            problems.append(
                Problem(
                    f"{stem}",
                    f"must be a pair, there is no {missing}",
                    remedy="complete or remove it",
                    colon=True,
                )
            )
        except (BrokenIndex, OSError) as error:
            problems.append(
                Problem(
                    f"{stem}",
                    f"must be whole, {error}",
                    remedy="write it again or remove it",
                    colon=True,
                )
            )
    if not stems:
        names = sorted({f.name[:-4] for f in files})[:12]
        there = ", ".join(names) or "no .bin and .idx files"
        problems.append(
            Problem(
                KEYS,
                f"{key!r} must be in the name of a file of {folder} (there are {there})",
                remedy="correct the key",
                colon=True,
            )
        )
    kinds = {str(reader.dtype) for _, reader in pairs}
    if len(kinds) > 1:
        problems.append(
            Problem(
                KEYS,
                f"the sets of {key!r} must be of one type, they are {' and '.join(sorted(kinds))}",
                remedy="merge those of one type",
                colon=True,
            )
        )
    return pairs, problems


def _check_lengths(groups: dict[str, list[tuple[Path, IndexedReader]]]) -> None:
    """Raises UserError where rows of one column would stand beside those of another row."""
    lengths = {key: [len(reader) for _, reader in pairs] for key, pairs in groups.items()}
    first, *others = lengths.values()
    if any(other != first for other in others):
        found = ", ".join(f"{key} {'+'.join(map(str, n))}" for key, n in lengths.items())
        raise UserError(
            Problem(
                KEYS,
                f"columns of one data set must have equally many sequences ({found})",
                remedy="merge what belongs together",
                colon=True,
            )
        )


def _write(output: Path, pairs: Sequence[tuple[Path, IndexedReader]]) -> None:
    """Under another name first, so that an older file is there until the new one is whole."""
    partial = output.with_name(f".{output.name}.partial")
    writer = IndexedWriter(partial, pairs[0][1].dtype.type)
    try:
        for _, reader in pairs:
            for place in range(len(reader)):
                sequence = reader[place]
                writer.add(np.ascontiguousarray(sequence).tobytes(), [len(sequence)])
        writer.close()
        output.with_name(f"{output.name}.idx").unlink(missing_ok=True)
        for ending in (".bin", ".idx"):
            shutil.move(f"{partial}{ending}", f"{output}{ending}")
    finally:
        for ending in (".bin", ".idx"):
            Path(f"{partial}{ending}").unlink(missing_ok=True)
