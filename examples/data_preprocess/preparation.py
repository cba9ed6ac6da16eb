"""Shared code of the scripts in this folder: arguments, reading raw rows, writing parquet files.

A script lists the files of its splits and turns one raw row into one row for training:

    data_source   text, chooses the reward rule and names the metrics
    prompt        chat messages {role, content}
    ability       text
    reward_model  {style: "rule" or "model", ground_truth: text}
    extra_info    {split, index, ...}, passed to reward functions

Training reads such files with `data.ground_truth_key=reward_model.ground_truth`.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.data.files import UnusableRow, read_rows

ROWS_PER_GROUP = 1024
MAX_ROW = 64 * 2**20  # largest line of a compressed file, and largest file with one row; bytes

Raw = dict[str, Any]
MakeRow = Callable[..., dict[str, Any]]
"""(raw row, split, index of the raw row in its split) -> row. Raises Unusable."""


class Unusable(ValueError):
    """Raised for a row to leave out; the message is the reason, under which rows are counted."""


class Failed(Exception):
    """Raised if the data set cannot be prepared; `problem` has rule, value and fix."""

    def __init__(self, key: str, rule: str, remedy: str, value: object = None) -> None:
        super().__init__(key)
        self.problem = Problem(key, rule, value, remedy)


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Attributes:
        name: name on the Hugging Face hub.
        files: written split -> glob patterns for its files; the first with a match is used.
        splits: written split -> its split on the hub.
        config: configuration on the hub, if the data set has several.
    """

    name: str
    files: Mapping[str, Sequence[str]]
    splits: Mapping[str, str]
    config: str | None = None


def patterns(split: str, folder: str = "") -> tuple[str, ...]:
    """Return patterns for a split's usual file names, by the authors and on the hub.

    `folder` holds the parquet files on the hub, "" = `data`.
    """
    names = (f"{split}.jsonl", f"{split}.jsonl.gz", f"{split}.json", f"{split}.parquet")
    return (*names, f"{split}-*.parquet", f"{folder or 'data'}/{split}-*.parquet")


def command(
    description: str,
    data_set: DataSet,
    makers: Mapping[str, MakeRow],
    instruction: str = "",
    argv: Sequence[str] | None = None,
) -> int:
    """Parse the arguments and prepare the data set; return the exit code, 2 after an error.

    Args:
        description: the script's docstring.
        data_set: what to prepare.
        makers: folder below --output ("" = --output itself) -> function making its rows.
        instruction: default for --instruction, passed to the functions; "" = no such argument.
        argv: the command line.
    """
    arguments = _make_parser(description, data_set, instruction).parse_args(argv)
    more = {"instruction": arguments.instruction} if instruction else {}
    try:
        for folder, make_row in makers.items():
            made = partial(make_row, **more)
            prepare(data_set, made, arguments.input, arguments.output / folder)
    except Failed as failed:
        print(f"error: {failed.problem}", file=sys.stderr)
        return 2
    except OSError as error:  # an error of writing; errors of reading are Failed
        rule = f"must be a folder that can be written: {error.strerror or error}"
        problem = Problem("--output", rule, arguments.output, "free it, or name another folder")
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


def _make_parser(description: str, data_set: DataSet, instruction: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument(
        "--input",
        "--local_dataset_path",
        required=True,
        metavar="FOLDER",
        help=f"folder with the files of the data set, or its name on the hub ({data_set.name}), "
        "which needs the package `datasets` and network",
    )
    parser.add_argument(
        "--output",
        "--local_save_dir",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder for the parquet files",
    )
    if instruction:
        parser.add_argument("--instruction", default=instruction, help="text after each question")
    return parser


def prepare(data_set: DataSet, make_row: MakeRow, source: str, output: Path) -> None:
    """Write `<split>.parquet` for each split found; print the number of rows.

    Unusable rows are left out and counted by reason. Raises Failed if the source has no split, is
    unreadable, or has no usable row.
    """
    found = {split: rows_of(data_set, split, source) for split in data_set.files}
    splits = {split: rows for split, rows in found.items() if rows is not None}
    if not splits:
        tried = ", ".join(name for names in data_set.files.values() for name in names)
        raise Failed("--input", f"must hold one of: {tried}", "correct the folder", source)
    for split, rows in splits.items():
        _prepare_split(split, rows, make_row, output / f"{split}.parquet")
    for split in found.keys() - splits.keys():
        print(f"note: {source} has no file of the split {split!r}", file=sys.stderr)


def _prepare_split(split: str, rows: Iterable[Raw], make_row: MakeRow, file: Path) -> None:
    """Write one split; print the rows written and left out. Raises Failed without a usable row."""
    dropped: Counter[str] = Counter()

    def made() -> Iterator[dict[str, Any]]:
        for index, raw in enumerate(rows):
            try:
                yield make_row(raw, split, index)
            except Unusable as reason:
                dropped[str(reason)] += 1

    written = write_parquet(file, made())
    print(f"{file}: {written} rows")
    for reason, count in dropped.most_common():
        print(f"  left out, {reason}: {count}")
    if not written:
        rule = "must hold at least one row that can be used"
        raise Failed(str(file), rule, "correct the files of --input")


def write_parquet(file: Path, rows: Iterator[dict[str, Any]]) -> int:
    """Write rows with one schema and return their number; without rows no file is written.

    The file appears once complete: it is written under another name and then renamed.
    """
    first = list(islice(rows, ROWS_PER_GROUP))
    if not first:
        return 0
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.partial")
    table, count = pa.Table.from_pylist(first), 0
    try:
        with pq.ParquetWriter(unfinished, table.schema) as writer:
            while table.num_rows:
                writer.write_table(table)
                count += table.num_rows
                chunk = list(islice(rows, ROWS_PER_GROUP))
                table = pa.Table.from_pylist(chunk, schema=table.schema)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def prompt_row(
    data_source: str,
    ability: str,
    messages: Sequence[Mapping[str, str]],
    ground_truth: str,
    extra_info: Mapping[str, Any],
    style: str = "rule",
) -> dict[str, Any]:
    """Return a training row, with the keys listed at the top of this module."""
    return {
        "data_source": data_source,
        "prompt": [dict(message) for message in messages],
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": dict(extra_info),
    }


def user(text: str) -> list[dict[str, str]]:
    """Return a chat with one user message."""
    return [{"role": "user", "content": text}]


def text_of(raw: Raw, key: str) -> str:
    """Return a raw row's text, stripped. Raises Unusable if missing or empty."""
    value = raw.get(key)
    if not isinstance(value, str) or not value.strip():
        raise Unusable(f"no text in {key!r}")
    return value.strip()


def rows_of(data_set: DataSet, split: str, source: str) -> Iterator[Raw] | None:
    """Return a split's raw rows from a folder, or from the hub if there is no such folder.

    Returns None if the folder has no file for the split. Raises Failed.
    """
    folder = Path(source)
    if not folder.exists():
        return _rows_of_hub(data_set, split, source)
    for pattern in data_set.files[split]:
        if files := sorted(folder.glob(pattern)):
            return (row for file in files for row in _rows_of_file(file))
    return None


def _rows_of_hub(data_set: DataSet, split: str, name: str) -> Iterator[Raw]:
    """Load rows from the hub with the package `datasets`. Raises Failed."""
    if name != data_set.name:
        rule = f"must be a folder, or the name {data_set.name}"
        raise Failed("--input", rule, "correct the path", name)
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        rule = "must be a folder: the package `datasets` is not installed, which loads by name"
        remedy = "give a folder with the files, or `pip install datasets`"
        raise Failed("--input", rule, remedy, name) from error
    try:
        loaded = datasets.load_dataset(name, data_set.config, split=data_set.splits[split])
    except Exception as error:  # of many types: network, rights, formats
        found = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = "check the network, or give a folder with the files"
        raise Failed(
            "--input", f"cannot be loaded by `datasets` ({found})", remedy, name
        ) from error
    return (dict(row) for row in loaded)


def _rows_of_file(file: Path) -> Iterator[Raw]:
    """Yield a file's rows. Raises Failed if it is unreadable or has a bad row."""
    try:
        if file.suffix == ".gz":
            yield from _compressed_rows(file)
            return
        if file.suffix == ".json" and isinstance(whole := _one_row(file), dict):
            yield whole
            return
        for number, row in read_rows(str(file)):
            if isinstance(row, UnusableRow):
                raise _broken(file, number, str(row.problem))
            yield row
    except UserError as error:
        raise _broken(file, 0, error.problems[0].rule) from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise _broken(file, 0, f"cannot be read ({error})") from error


def _one_row(file: Path) -> Any:
    """Return the content of a file with one JSON value, None if it has one per line."""
    try:
        return json.loads(Path(file).read_bytes())
    except ValueError:
        return None


def _compressed_rows(file: Path) -> Iterator[Raw]:
    """Yield rows from a gzipped jsonl file, skipping empty lines. Raises Failed for a bad line."""
    with gzip.open(file) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_ROW + 1), b""), start=1):
            row = json.loads(line) if len(line) <= MAX_ROW and line.strip() else None
            if line.strip() and not isinstance(row, dict):
                raise _broken(
                    file, number, f"a line must be one JSON object of {MAX_ROW >> 20} MiB"
                )
            if isinstance(row, dict):
                yield row


def _broken(file: Path, row: int, found: str) -> Failed:
    where = f"{file}:{row}" if row else str(file)
    return Failed(where, f"must be whole: {found}", "download it again")
