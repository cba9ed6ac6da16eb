"""Rows of prompt files (jsonl, parquet) and the problems found in them, named by file and row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_PROBLEMS_PER_FILE = 10  # different ones; equal problems of many rows count as one
MAX_KEYS_SHOWN = 12

Row = dict[str, Any]


class FileProblems:
    """Problems of one file; the same problem in many rows becomes one line with a count."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._rows: dict[str, list[int]] = {}

    def add(self, row: int, message: str) -> None:
        """`row` counts from 1: line of a jsonl file, row of a parquet file; 0 = the whole file."""
        self._rows.setdefault(message, []).append(row)

    def lines(self) -> list[str]:
        """`file:row: message`, at most MAX_PROBLEMS_PER_FILE, then a line that counts the rest."""
        items = sorted(self._rows.items(), key=lambda item: item[1][0])
        lines = [self._line(message, rows) for message, rows in items[:MAX_PROBLEMS_PER_FILE]]
        if rest := items[MAX_PROBLEMS_PER_FILE:]:
            count = sum(len(rows) for _, rows in rest)
            lines.append(f"{self._file}: {count} more rows with problems like these")
        return lines

    def _line(self, message: str, rows: list[int]) -> str:
        where = f"{self._file}:{rows[0]}" if rows[0] else self._file
        more = f" ({len(rows) - 1} more rows have the same problem)" if len(rows) > 1 else ""
        return f"{where}: {message}{more}"


def read_rows(file: str, problems: FileProblems) -> Iterator[tuple[int, Row]]:
    """(row number from 1, row) of a .jsonl or .parquet file; what is unreadable goes to `problems`.

    jsonl is UTF-8 whatever the locale; blank lines are skipped but counted.
    """
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    suffix = Path(file).suffix.lower()
    count = 0
    if suffix not in readers:
        problems.add(
            0, f"a data file must be .jsonl or .parquet, not {suffix!r}; convert or rename it"
        )
        return
    try:
        for numbered_row in readers[suffix](file, problems):
            count += 1
            yield numbered_row
    except FileNotFoundError:
        problems.add(0, "no such file; correct data.train_files or data.val_files")
        return
    except OSError as error:
        problems.add(0, f"cannot be read: {error.strerror or error}; check the path and its rights")
        return
    if count == 0 and not problems.lines():
        problems.add(
            0, "a data file must hold at least one row, this one is empty; fill or drop it"
        )


def look_up(row: Row, key: str) -> Any:
    """Value of `key`; dots reach nested objects unless the row has the dotted key itself.

    Returns None when it is absent or null.
    """
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def describe_keys(row: Row) -> str:
    """The row's keys for an error message, a long list cut short."""
    keys = list(row)
    shown = ", ".join(keys[:MAX_KEYS_SHOWN]) or "none"
    return shown + (", ..." if len(keys) > MAX_KEYS_SHOWN else "")


def _jsonl_rows(file: str, problems: FileProblems) -> Iterator[tuple[int, Row]]:
    with open(file, "rb") as stream:  # bytes: a line that is not UTF-8 can then be named
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # byte order mark
            if not line.strip():
                continue
            row = _parse_line(line, number, problems)
            if row is not None:
                yield number, row


def _parse_line(line: bytes, number: int, problems: FileProblems) -> Row | None:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        bad = line[error.start]
        problems.add(number, f"text must be UTF-8, byte 0x{bad:02x} is not; save the file as UTF-8")
        return None
    except json.JSONDecodeError as error:
        start = line.decode("utf-8").strip()[:40]
        problems.add(
            number,
            f"a line must be one JSON object, this one is not JSON ({error.msg} at column "
            f"{error.colno}: {start!r}); repair or remove the line",
        )
        return None
    if not isinstance(row, dict):
        problems.add(
            number,
            f"a line must be one JSON object, this one is {type(row).__name__}; "
            "write one {...} per line",
        )
        return None
    return row


def _parquet_rows(file: str, problems: FileProblems) -> Iterator[tuple[int, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with open(file, "rb") as stream:
            for batch in pq.ParquetFile(stream).iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pa.ArrowException as error:
        message = str(error).splitlines()[0]
        problems.add(number, f"must be a parquet file ({message}); write it again or use jsonl")
