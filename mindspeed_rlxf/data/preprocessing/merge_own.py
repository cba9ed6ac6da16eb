"""`--merge-group-keys` of sets that `preprocess_data.py` wrote: the merged one is such a set too.

It has a sidecar, so what the sets were made with has to be the same; counts are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.data.handlers import HANDLERS
from mindspeed_rlxf.data.indexed import IndexedReader
from mindspeed_rlxf.data.preprocessing.writer import (
    PromptSetWriter,
    existing_files,
    finish_interrupted,
)
from mindspeed_rlxf.data.sidecar import Sidecar, data_path, read_sidecar, rejected_path

SIDECAR_ENDING = "_packed_meta.json"
Pairs = Sequence[tuple[Path, IndexedReader]]

KEYS = "--merge-group-keys"


@dataclass(frozen=True)
class OwnSet:
    """prefix: as in data.data_path; readers: by the file names of the columns."""

    prefix: Path
    sidecar: Sidecar
    readers: dict[str, IndexedReader]


def own_prefixes(folder: Path, groups: Mapping[str, Pairs]) -> list[Path]:
    """Prefixes of the sets with a sidecar to which pairs of the groups belong, sorted by name."""
    names = {stem.name for pairs in groups.values() for stem, _ in pairs}
    prefixes = (f.name[: -len(SIDECAR_ENDING)] for f in folder.glob(f"*{SIDECAR_ENDING}"))
    own = sorted(p for p in prefixes if any(n.startswith(f"{p}_packed_") for n in names))
    return [folder / prefix for prefix in own]


def merge_own(prefixes: Sequence[Path], groups: Mapping[str, Pairs], output: Path) -> None:
    """Writes the set `output`, whole or not at all, in place of an older one.

    Rows are in the order of the prefixes. Raises UserError with all that differs or is missing,
    OSError when the disk refuses.
    """
    finish_interrupted(output)
    sets = _open(prefixes, groups)
    first = sets[0].sidecar
    counts = _sum([each.sidecar.counts for each in sets])
    has_rejected = False
    with PromptSetWriter(output, HANDLERS[first.handler]) as writer:
        for each in sets:
            writer.append({c.file: each.readers[c.file] for c in first.columns})
            if rejected_path(each.prefix).exists():
                writer.append_rejected(rejected_path(each.prefix))
                has_rejected = True
        writer.commit(first.model_copy(update={"counts": counts}), has_rejected)


def in_the_way(output: Path) -> list[str]:
    """Names of files of a set that is there already, or was whole when its writer was killed."""
    finish_interrupted(output)
    return [file.name for file in existing_files(output)]


def _open(prefixes: Sequence[Path], groups: Mapping[str, Pairs]) -> list[OwnSet]:
    readers = {stem: reader for pairs in groups.values() for stem, reader in pairs}
    sets: list[OwnSet] = []
    problems: list[Problem] = []
    known: set[Path] = set()
    for prefix in prefixes:
        try:
            sidecar = read_sidecar(prefix)
        except UserError as error:
            problems += error.problems
            continue
        assert sidecar is not None, "its name was found"
        paths = {c.file: data_path(prefix, c.file) for c in sidecar.columns}
        known.update(paths.values())
        found = {file: readers[path] for file, path in paths.items() if path in readers}
        sets.append(OwnSet(prefix, sidecar, found))
    if problems:
        raise UserError(problems)
    problems = [*_foreign(sorted(readers.keys() - known), prefixes), *_differences(sets)]
    problems += _key_problems(groups, sets[0].sidecar)
    problems = problems or [problem for each in sets for problem in _damage(each)]
    if problems:
        raise UserError(problems)
    return sets


def _foreign(stems: Sequence[Path], prefixes: Sequence[Path]) -> Iterator[Problem]:
    for stem in stems:
        like = f"as {prefixes[0].name}{SIDECAR_ENDING} does"
        yield Problem(
            f"{stem}",
            f"no {SIDECAR_ENDING} says how it was made, {like}",
            remedy="merge sets of one kind",
            colon=True,
        )


def _differences(sets: Sequence[OwnSet]) -> Iterator[Problem]:
    """What decides the token ids or the columns, and is not the same in all sets."""
    first = sets[0]
    for each in sets[1:]:
        for name, ours in _makers(first.sidecar).items():
            theirs = _makers(each.sidecar)[name]
            if ours != theirs:
                listed = ",".join(str(one.prefix) for one in sets)
                yield Problem(
                    KEYS,
                    f"sets must be made alike, {name} of {first.prefix.name} is "
                    f"{_shown(ours, theirs)}, of {each.prefix.name} {_shown(theirs, ours)}",
                    remedy=f"preprocess them alike, or train on data.data_path=[{listed}]",
                    colon=True,
                )
    if first.sidecar.handler not in HANDLERS:
        yield _again(first, f"handler {first.sidecar.handler!r} is not known here")


def _again(each: OwnSet, rule: str) -> Problem:
    return Problem(f"{each.prefix}", rule, remedy="write it again", colon=True)


def _makers(sidecar: Sidecar) -> dict[str, Any]:
    return {
        "handler": sidecar.handler,
        "template": sidecar.template,
        "allow_special_tokens": sidecar.allow_special_tokens,
        "stop_token_ids": sorted(sidecar.stop_token_ids),
        "tokenizer sha256": sidecar.tokenizer.sha256[:12],
        "columns": {f"{c.name!r} ({c.file}, {c.dtype}, {c.encoding})" for c in sidecar.columns},
    }


def _shown(value: Any, other: Any) -> str:
    """Of columns those that the other set lacks."""
    if not isinstance(value, set):
        return str(value)
    return f"with {', '.join(sorted(value - other))}" if value - other else "without more"


def _key_problems(groups: Mapping[str, Pairs], sidecar: Sidecar) -> Iterator[Problem]:
    """A set without one of its columns, or under other names, could not be read."""
    keys = [f"packed_{column.file}_document" for column in sidecar.columns]
    if set(groups) != set(keys):
        yield Problem(
            KEYS,
            f"must name all columns of sets with {SIDECAR_ENDING}, it is {' '.join(groups)}",
            remedy=f"give {' '.join(keys)}",
        )


def _damage(each: OwnSet) -> Iterator[Problem]:
    for column in each.sidecar.columns:
        if column.file not in each.readers:
            path = data_path(each.prefix, column.file)
            yield _again(each, f"must be whole, there is no {path.name}.idx")
        elif str(each.readers[column.file].dtype) != column.dtype:
            kind = each.readers[column.file].dtype
            yield _again(each, f"{column.file} must be {column.dtype}, not {kind}")
    lengths = {file: len(reader) for file, reader in each.readers.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{file} {length}" for file, length in lengths.items())
        yield _again(each, f"columns must have equally many rows ({found})")


def _sum(all_counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An id that stands in two sets is not counted as repeated."""
    total: dict[str, Any] = {}
    for counts in all_counts:
        for name, value in counts.items():
            if isinstance(value, dict):
                total[name] = _sum([total.get(name, {}), value])
            else:
                total[name] = total.get(name, 0) + value
    return total
