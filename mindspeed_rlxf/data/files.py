"""Read rows from data files (jsonl, json, parquet), and report problems by file and row."""

import base64
import contextlib
import datetime
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from mindspeed_rlxf.config.problems import MissingFile, Problem, UserError
from mindspeed_rlxf.config.registry import add_to

MAX_PROBLEMS_PER_FILE = 10  # different ones; equal problems of many rows count as one
MAX_KEYS_SHOWN = 12

Row = dict[str, Any]


def fault(rule: str, remedy: str) -> Problem:
    """Make a problem without a key; `FileProblems` fills in `file:row`."""
    return Problem("", rule, remedy=remedy)


class FileProblems:
    """Collects one file's problems; a problem shared by many rows becomes one line with a count."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._rows: dict[Problem, list[int]] = {}

    def add(self, row: int, problem: Problem) -> None:
        """Add a row's problem (from 1: line in a jsonl file), or with 0 the whole file's."""
        self._rows.setdefault(problem, []).append(row)

    def count_rows(self) -> int:
        """Count the distinct rows with a problem."""
        return len(set().union(*self._rows.values()))

    def list_problems(self) -> list[Problem]:
        """Return the problems in row order, each keyed by `file:row` of its first row.

        After MAX_PROBLEMS_PER_FILE different ones, only the number of rows is given.
        """
        rows_of_problem = sorted(self._rows.items(), key=lambda item: item[1][0])
        problems = []
        for problem, rows in rows_of_problem[:MAX_PROBLEMS_PER_FILE]:
            key = f"{self.file}:{rows[0]}" if rows[0] else self.file
            remedy = problem.remedy
            if len(rows) > 1:
                remedy += f" ({len(rows) - 1} more rows have the same problem)"
            problems.append(replace(problem, key=key, colon=True, remedy=remedy))
        num_rest = sum(len(rows) for _, rows in rows_of_problem[MAX_PROBLEMS_PER_FILE:])
        if num_rest > 0:
            rule = f"{num_rest} more rows with problems like these"
            problems.append(Problem(self.file, rule, colon=True))
        return problems


class UnusableRow(ValueError):
    """A row that cannot be read or makes no example.

    Attributes:
        reason: short name for counting dropped rows.
        raw: an unreadable row's text in the file.
    """

    def __init__(self, reason: str, rule: str, remedy: str, raw: str = "") -> None:
        super().__init__(reason, rule, remedy, raw)  # all of them, so that it can be pickled
        self.reason = reason
        self.problem = fault(rule, remedy)
        self.raw = raw

    def __str__(self) -> str:
        return str(self.problem)


def read_rows(file: str, name: str = "") -> Iterator[tuple[int, Row | UnusableRow]]:
    """Yield (row number from 1, row); an UnusableRow stands for an unreadable row.

    Blank lines are skipped, but count in the row numbers. NaN, which pandas writes for what is
    missing, is read as null.

    Raises:
        UserError: keyed by `name` (default: the path), if the file cannot be read to its end.
    """
    suffix = Path(file).suffix.lower()
    number = 0  # of the last row that was read
    try:
        if suffix not in READERS:
            rule = f"a data file must be {', '.join(READERS)}, not {suffix!r}"
            problem = fault(rule, "convert or rename it")
        else:
            for number, row in READERS[suffix](file) if os.path.getsize(file) else ():
                yield number, without_nan(row)
            return
    except FileNotFoundError:
        problem = MissingFile("", "no such file", remedy="correct the path")
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        problem = fault(rule, "check the path and its rights")
    except Exception as error:  # pyarrow raises many types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        problem = fault(f"must be a {suffix} file ({reason})", "write it again, as .jsonl perhaps")
    key = name or file
    if number:
        key += f":{number}"
    raise UserError(replace(problem, key=key, colon=True))


def check_files(files: Iterable[str]) -> Iterator[Problem]:
    """Yield the problems of data files that are missing, empty or broken, whatever their keys."""
    for file in files:
        file_problems = FileProblems(file)
        num_rows = 0
        try:
            for num_rows, row in read_rows(file):
                if isinstance(row, UnusableRow):
                    file_problems.add(num_rows, row.problem)
        except UserError as error:
            yield from error.problems
            continue
        if num_rows == 0:
            yield empty_file(file)
        yield from file_problems.list_problems()


def empty_file(file: str) -> Problem:
    """Return the problem of a data file without rows."""
    rule = "a data file must hold at least one row, this one is empty"
    return Problem(file, rule, remedy="fill or drop it", colon=True)


def count_rows(file: str) -> int:
    """Return a data file's number of rows; parquet files say it in their footer.

    Raises:
        UserError: The file cannot be read.
    """
    if Path(file).suffix.lower() == ".parquet" and Path(file).is_file():
        import pyarrow.parquet as pq

        with contextlib.suppress(Exception):  # `read_rows` reports it
            return int(pq.ParquetFile(file).metadata.num_rows)
    return sum(1 for _ in read_rows(file))


def without_nan(value: Any, is_null: Callable[[float], bool] = math.isnan) -> Any:
    """Return the value with None for each NaN, also inside lists and objects.

    `is_null` chooses other numbers.
    """
    if isinstance(value, float):
        return None if is_null(value) else value
    if isinstance(value, dict):
        return {key: without_nan(entry, is_null) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_nan(entry, is_null) for entry in value]
    return value


def number_text(value: str | int | float) -> str:
    """Return a text or number as text; a whole number, which pandas writes as 18.0, as 18."""
    is_whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if is_whole else str(value)


def describe_absence(row: Row, key: str) -> str:
    """Say why `look_up` found nothing: null, or which keys the row has."""
    *path, name = [key] if key in row else key.split(".")
    holder = look_up(row, ".".join(path)) if path else row
    if isinstance(holder, dict) and name in holder:
        return "here it is null"
    return f"this one has {describe_keys(row)}"


def find_row_without(file: str, key: str) -> Row | None:
    """Return a data file's first row if no row has a value for `key`, else None.

    Raises:
        UserError: The file cannot be read.
    """
    first_row: Row | None = None
    for _, row in read_rows(file):
        if isinstance(row, UnusableRow):
            continue
        if look_up(row, key) is not None:
            return None
        first_row = first_row or row
    return first_row


def list_keys(row: Row) -> list[str]:
    """Return the keys that `look_up` can find: the row's, and those of its objects as `a.b`."""
    keys = [*row]
    for name, value in row.items():
        if isinstance(value, dict):
            keys += [f"{name}.{nested}" for nested in list_keys(value)]
    return keys


def look_up(row: Row, key: str) -> Any:
    """Return the row's value for `key`, None if absent or null.

    "a.b" means field b of the object a (None if that is no object), unless the row has a field
    named "a.b".
    """
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def unicode_problem(text: str) -> Problem | None:
    """Return a problem if UTF-8 cannot encode the text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        return fault(f"text must be valid Unicode, {half} is half a character", "repair the row")
    return None


def describe_keys(names: Iterable[str]) -> str:
    """Join the first MAX_KEYS_SHOWN keys with commas for an error message; "none" without keys."""
    keys = [name[:60] for name in names]
    if len(keys) > MAX_KEYS_SHOWN:
        keys = [*keys[:MAX_KEYS_SHOWN], "..."]
    return ", ".join(keys) or "none"


def as_text(value: Any) -> str:
    """Return text for a value JSON lacks: ISO format for dates and times, base64 for bytes."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return str(value)


def _jsonl_rows(file: str) -> Iterator[tuple[int, Row | UnusableRow]]:
    with open(file, "rb") as stream:  # bytes, to name a line outside UTF-8
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, _parse_line(line)


def _parse_line(line: bytes) -> Row | UnusableRow:
    raw = line.decode("utf-8-sig", "backslashreplace").strip()
    rule = "a line must be one JSON object, this one is"
    remedy = "repair or remove the line"
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        rule = f"{rule} not JSON in UTF-8 ({error}): {raw[:40]!r}"
        return UnusableRow("not JSON", rule, remedy, raw)
    if isinstance(row, dict):
        return row
    return UnusableRow("not an object", f"{rule} {type(row).__name__}", remedy, raw)


def _json_rows(file: str) -> Iterator[tuple[int, Row | UnusableRow]]:
    with open(file, "rb") as stream:
        start = stream.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):  # one object per line
        yield from _jsonl_rows(file)
        return
    for number, row in enumerate(json.loads(Path(file).read_text(encoding="utf-8-sig")), start=1):
        if not isinstance(row, dict):
            rule = f"an element must be an object, this one is {type(row).__name__}"
            row = UnusableRow("not an object", rule, "write {...}", json.dumps(row))
        yield number, row


def _parquet_rows(file: str) -> Iterator[tuple[int, Row | UnusableRow]]:
    import pyarrow.parquet as pq

    number = 0
    with open(file, "rb") as stream:
        # Buffered, because otherwise whole columns of a row group are read.
        table = pq.ParquetFile(stream, buffer_size=2**20, pre_buffer=False)
        for batch in table.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield number, row


Reader: TypeAlias = Callable[[str], Iterator[tuple[int, Row | UnusableRow]]]
READERS: dict[str, Reader] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
}
"""File extension -> function yielding rows as `read_rows` does."""


def register_reader(suffix: str) -> Callable[[Reader], Reader]:
    """Return a decorator that adds a reader of files with this suffix, such as `.csv`.

    The rows may come from elsewhere: the file then says from where. ValueError if it is taken.
    """
    return add_to(READERS, suffix, "reader")
