"""Read rows of data files (jsonl, json, parquet), and report problems by file and row."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.problems import Problem

MAX_PROBLEMS_PER_FILE = 10  # different ones; equal problems of many rows count as one
MAX_KEYS_SHOWN = 12

Row = dict[str, Any]


def fault(rule: str, remedy: str) -> Problem:
    """Make a problem of a row or a file with an empty key; `FileProblems` fills in `file:row`."""
    return Problem("", rule, remedy=remedy)


class FileProblems:
    """Collects the problems of one file; a problem of many rows becomes one line with a count."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._rows: dict[Problem, list[int]] = {}
        self.is_whole = True  # every row was read; False after a problem of the file as a whole

    def add(self, row: int, problem: Problem, ends: bool = False) -> None:
        """Add the problem of one row, or of the whole file.

        row:  from 1, line of a jsonl file, row of a parquet file; 0 = the whole file
        ends: True = no row after this one can be read; clears `is_whole`, as row 0 does
        """
        self._rows.setdefault(problem, []).append(row)
        self.is_whole = self.is_whole and not ends and row > 0

    def count_rows(self) -> int:
        """Count the different rows with a problem; problems of the whole file count as one row."""
        return len({row for rows in self._rows.values() for row in rows})

    def list_problems(self) -> list[Problem]:
        """Return the collected problems, each keyed by `file:row` of its first row, in row order.

        After MAX_PROBLEMS_PER_FILE different ones, only the number of rows is given.
        """
        items = sorted(self._rows.items(), key=lambda item: item[1][0])
        found = []
        for problem, rows in items[:MAX_PROBLEMS_PER_FILE]:
            where = f"{self.file}:{rows[0]}" if rows[0] else self.file
            more = f" ({len(rows) - 1} more rows have the same problem)" if len(rows) > 1 else ""
            found.append(replace(problem, key=where, colon=True, remedy=problem.remedy + more))
        if num_rest := sum(len(rows) for _, rows in items[MAX_PROBLEMS_PER_FILE:]):
            found.append(
                Problem(self.file, f"{num_rest} more rows with problems like these", colon=True)
            )
        return found


@dataclass(frozen=True)
class BadRow:
    """A row that could not be read.

    reason: short name under which dropped rows are counted
    raw:    text of the row in the file
    """

    reason: str
    problem: Problem
    raw: str


class BrokenFile(ValueError):
    """A file cannot be read to its end. row: where reading stopped, 0 = before the first row"""

    def __init__(self, row: int, problem: Problem) -> None:
        super().__init__(str(problem))
        self.row, self.problem = row, problem


def read_rows(
    file: str, problems: FileProblems, keys: str = "data.train_files or data.val_files"
) -> Iterator[tuple[int, Row]]:
    """Yield (row number from 1, row) of a data file; nothing is raised for the file's content.

    Unreadable rows and files are added to `problems`. Of a broken file, the rows before the fault
    are yielded. keys: config keys that name the file, for the error's remedy
    """
    suffix = Path(file).suffix.lower()
    if suffix not in READERS:
        rule = f"a data file must be .jsonl, .json or .parquet, not {suffix!r}"
        problems.add(0, fault(rule, "convert or rename it"))
        return
    count = 0
    try:
        for number, row in READERS[suffix](file):
            if isinstance(row, BadRow):
                problems.add(number, row.problem)
            else:
                count += 1
                yield number, row
    except BrokenFile as error:
        problems.add(error.row, error.problem, ends=True)
    except FileNotFoundError:
        problems.add(0, fault("no such file", f"correct {keys}"))
        return
    except OSError as error:
        problems.add(
            0, fault(f"cannot be read: {error.strerror or error}", "check the path and its rights")
        )
        return
    if count == 0 and not problems.list_problems():
        problems.add(
            0, fault("a data file must hold at least one row, this one is empty", "fill or drop it")
        )


def look_up(row: Row, key: str) -> Any:
    """Return the row's value of `key`, None when it is absent or null.

    "a.b" means field b of the object a (None if that is no object), unless the row has a field
    named "a.b".
    """
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def unicode_problem(text: str) -> Problem | None:
    """Return the problem of a text that UTF-8 cannot encode; None where it can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        return fault(f"text must be valid Unicode, {half} is half a character", "repair the row")
    return None


def describe_keys(names: Iterable[str]) -> str:
    """Join keys with commas for an error message; "..." stands for those after MAX_KEYS_SHOWN.

    "none" for no keys.
    """
    keys = list(names)
    return ", ".join(keys[:MAX_KEYS_SHOWN] + ["..."] * (len(keys) > MAX_KEYS_SHOWN)) or "none"


def _jsonl_rows(file: str) -> Iterator[tuple[int, Row | BadRow]]:
    with open(file, "rb") as stream:  # as bytes, to name a line that is not UTF-8
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # byte order mark
            if line.strip():
                yield number, _parse_line(line)


def _parse_line(line: bytes) -> Row | BadRow:
    raw = line.decode("utf-8", "backslashreplace").strip()
    rule, remedy = "a line must be one JSON object, this one is", "repair or remove the line"
    try:
        row = json.loads(line.decode("utf-8").rstrip("\r\n"))
    except (ValueError, RecursionError) as error:
        problem = fault(f"{rule} not JSON in UTF-8 ({error}): {raw[:40]!r}", remedy)
        return BadRow("not JSON", problem, raw)
    if isinstance(row, dict):
        return row
    return BadRow("not an object", fault(f"{rule} {type(row).__name__}", remedy), raw)


def _json_rows(file: str) -> Iterator[tuple[int, Row | BadRow]]:
    with open(file, "rb") as stream:
        start = stream.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):  # one object per line
        yield from _jsonl_rows(file)
        return
    try:
        rows = json.loads(Path(file).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        rule = f"must be a JSON array of objects ({error})"
        raise BrokenFile(0, fault(rule, "repair it or write one {...} a line")) from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            rule = f"an element must be an object, this one is {type(row).__name__}"
            row = BadRow("not an object", fault(rule, "write {...}"), json.dumps(row))
        yield number, row


def _parquet_rows(file: str) -> Iterator[tuple[int, Row | BadRow]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    with open(file, "rb") as stream:
        try:
            # With a buffer, because a column of a row group is read as a whole otherwise.
            table = pq.ParquetFile(stream, buffer_size=2**20, pre_buffer=False)
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        # LookupError: a time zone that this host does not know
        except (pa.ArrowException, ValueError, LookupError) as error:
            message = (str(error).splitlines() or [type(error).__name__])[0]
            problem = fault(f"must be a parquet file ({message})", "write it again or use jsonl")
            raise BrokenFile(number, problem) from error


READERS: dict[str, Callable[[str], Iterator[tuple[int, Row | BadRow]]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
}
"""File name ending -> function that yields (row number from 1, row) of such a file.

Rows that are not a valid JSON object are yielded as BadRow. Blank lines are skipped, but count in
the row numbers. Raises BrokenFile, or OSError when the file cannot be opened or read.
"""
