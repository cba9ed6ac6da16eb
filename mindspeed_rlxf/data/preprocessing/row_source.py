"""Read the rows of all input files, group them in chunks, and count what becomes of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.data.files import READERS, BadRow, BrokenFile, FileProblems
from mindspeed_rlxf.data.preprocessing.row_encoder import EncodedChunk, NumberedRow

CHUNK_ROWS = 512

Progress = Callable[[int], None]


@dataclass
class Counts:
    """How many rows were read, written, dropped and cut.

    dropped:      reason -> number of rows
    repeated_ids: rows whose `id` an earlier row has
    skipped:      entries of the input folders that are no data files
    refusals:     (reason, file) -> the problems of these rows
    columns:      names of the columns of all rows, in the order of their first row
    not_slow:     why the fast tokenizer was used although the slow one was asked for, "" = it was
                  not
    """

    rows_read: int = 0
    rows_written: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    repeated_ids: int = 0
    num_tokens: int = 0
    unknown_tokens: int = 0
    empty_files: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    not_slow: str = ""
    refusals: dict[tuple[str, str], FileProblems] = field(default_factory=dict)
    columns: dict[str, None] = field(default_factory=dict)

    def add(self, chunk: EncodedChunk) -> None:
        """Add the counts of an encoded chunk; `rows_read` is counted by `read_chunks`."""
        self.rows_written += chunk.num_rows
        self.cut += chunk.num_cut
        self.num_tokens += chunk.num_tokens
        self.unknown_tokens += chunk.num_unknown
        for row in chunk.rejected:
            self.dropped[row.reason] += 1
            found = self.refusals.setdefault((row.reason, row.file), FileProblems(row.file))
            found.add(row.row, row.problem)

    def list_problems(self, only: str | None = None) -> list[Problem]:
        """Return the problems of dropped rows, keyed by `file:row`; equal ones of a file are one.

        only: return those of rows dropped for this reason, None = for all reasons
        """
        chosen = [f for (reason, _), f in self.refusals.items() if only in (None, reason)]
        return [problem for found in chosen for problem in found.list_problems()]

    def as_dict(self) -> dict[str, int | dict[str, int]]:
        """Return the counts for the sidecar."""
        return {
            "rows_read": self.rows_read,
            "rows_written": self.rows_written,
            "dropped": dict(sorted(self.dropped.items())),
            "cut": self.cut,
            "repeated_ids": self.repeated_ids,
            "tokens": self.num_tokens,
            "unknown_tokens": self.unknown_tokens,
        }


def find_files(inputs: Sequence[str], skipped: list[str]) -> list[str]:
    """List the data files of `inputs`, which are files and folders, in that order.

    A folder's own files are sorted by name; subfolders are not searched. Other entries of a folder
    are appended to `skipped`. Raises UserError with every path that does not exist, file of an
    unknown ending and folder without data files.
    """
    files, problems = [], []
    endings = ", ".join(READERS)
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            inside = sorted(str(entry) for entry in path.iterdir())
            good = [e for e in inside if Path(e).suffix.lower() in READERS and Path(e).is_file()]
            skipped += [entry for entry in inside if entry not in good]
            files += good
            if not good:
                rule = f"the folder must hold {endings} files, it has none"
                problems.append(_input_problem(name, rule, "name another"))
        elif not path.exists():
            problems.append(_input_problem(name, "no such file or folder", "correct the path"))
        elif path.suffix.lower() not in READERS:
            rule = f"a data file must end in {endings}, not in {path.suffix!r}"
            problems.append(_input_problem(name, rule, "convert or rename it"))
        else:
            files.append(name)
    if problems:
        raise UserError(problems)
    return files


def _input_problem(name: str, rule: str, remedy: str) -> Problem:
    return Problem(f"--input {name}", rule, remedy=remedy, colon=True)


def read_chunks(
    files: Sequence[str], max_rows: int | None, counts: Counts, progress: Progress
) -> Iterator[list[NumberedRow]]:
    """Yield at most `max_rows` rows of all files, None = all, in lists of CHUNK_ROWS.

    Adds to `counts`, and calls `progress` after each row.
    """
    rows = islice(_read_all(files, counts, progress), max_rows)
    while chunk := list(islice(rows, CHUNK_ROWS)):
        yield chunk


def _read_all(files: Sequence[str], counts: Counts, progress: Progress) -> Iterator[NumberedRow]:
    ids: set[str] = set()
    for file in files:
        before, read = counts.rows_read, READERS[Path(file).suffix.lower()]
        try:
            for number, row in read(file) if os.path.getsize(file) else ():
                counts.rows_read += 1
                if not isinstance(row, BadRow):
                    if not row.keys() <= counts.columns.keys():
                        counts.columns |= dict.fromkeys(row)
                    if isinstance(row.get("id"), (str, int)):
                        counts.repeated_ids += repr(row["id"]) in ids
                        ids.add(repr(row["id"]))
                yield NumberedRow(file, number, row)
                progress(counts.rows_read)
        except BrokenFile as error:
            name = f"{file}:{error.row}" if error.row else file
            found = _input_problem(name, error.problem.rule, error.problem.remedy)
            raise UserError(found) from error
        except OSError as error:
            rule = f"cannot be read ({error.strerror or error})"
            remedy = "check the path and its rights"
            raise UserError(_input_problem(file, rule, remedy)) from error
        if counts.rows_read == before:
            counts.empty_files.append(file)
