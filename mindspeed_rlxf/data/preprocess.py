"""Files of rows become an indexed prompt data set: read, tokenize in processes, write in order."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.suggest import closest
from mindspeed_rlxf.data.conversation import MapKeys
from mindspeed_rlxf.data.files import (
    READERS,
    BadRow,
    BrokenFile,
    FileProblems,
    describe_keys,
    scan_rows,
)
from mindspeed_rlxf.data.preprocess_worker import start_worker, work
from mindspeed_rlxf.data.prompt_encoder import PromptEncoder
from mindspeed_rlxf.data.prompt_set_writer import PromptSetWriter, existing_files
from mindspeed_rlxf.data.row_encoder import (
    TOO_LONG,
    EncodedChunk,
    NumberedRow,
    Rejected,
    RowEncoder,
)
from mindspeed_rlxf.data.sidecar import Sidecar, TokenizerId
from mindspeed_rlxf.data.tokenizer import load_tokenizer, vocabulary_hash

HANDLER = "PPOAlpacaStyleInstructionHandler"
CHUNK_ROWS = 512
CHUNK_CHARACTERS = 4_000_000  # about; a chunk ends with the row that passes it
CHUNKS_AHEAD = 2  # per process, so that memory stays bounded

Progress = Callable[[int], None]


@dataclass(frozen=True)
class PreprocessOptions:
    """The flags of the command.

    max_prompt_length: in tokens, None = any
    max_samples:       rows that are read, None = all
    """

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer_path: str
    template: str = "empty"
    map_keys: MapKeys = field(default_factory=MapKeys)
    workers: int = 1
    max_prompt_length: int | None = None
    overlong: OverlongPrompts = OverlongPrompts.DROP
    max_samples: int | None = None
    strict: bool = False
    overwrite: bool = False


@dataclass
class Counts:
    """What became of the rows. `skipped`: files of a folder that are of no known type."""

    rows_read: int = 0
    rows_written: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    repeated_ids: int = 0
    empty_files: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, chunk: EncodedChunk) -> None:
        self.rows_written += len(chunk.lengths)
        self.cut += chunk.num_cut
        self.dropped.update(reject.reason for reject in chunk.rejected)

    def numbers(self) -> dict[str, int | dict[str, int]]:
        """For the sidecar."""
        return {
            "rows_read": self.rows_read,
            "rows_written": self.rows_written,
            "dropped": dict(sorted(self.dropped.items())),
            "cut": self.cut,
            "repeated_ids": self.repeated_ids,
        }


def preprocess(options: PreprocessOptions, progress: Progress = lambda rows: None) -> Counts:
    """Writes the data set of `options.output_prefix`, whole or not at all.

    progress: called with the number of rows read so far.
    Raises UserError: what cannot be read or written, no row left, and with `strict` (or
    `overlong` ERROR) every row that is dropped.
    """
    prefix = _checked_prefix(options)
    counts = Counts()
    files = find_files(options.inputs, counts.skipped)
    tokenizer = load_tokenizer(options.tokenizer_path, "--tokenizer-name-or-path")
    prompts = PromptEncoder(tokenizer, options.template)
    encoder = RowEncoder(prompts, options.map_keys, options.max_prompt_length, options.overlong)
    rows = _RowSource(files, options.max_samples, counts, progress)
    try:
        with PromptSetWriter(prefix) as writer:
            _write_rows(rows, encoder, options, counts, writer)
            sidecar = Sidecar(
                handler=HANDLER,
                template=options.template,
                stop_token_ids=tuple(prompts.stop_token_ids),
                tokenizer=TokenizerId(
                    path=readable(options.tokenizer_path), sha256=vocabulary_hash(tokenizer)
                ),
                columns=writer.columns(),
                counts=counts.numbers(),
            )
            writer.commit(sidecar, has_rejected=bool(counts.dropped))
    except OSError as error:
        raise UserError(
            f"--output-prefix={readable(str(prefix))} cannot be written: "
            f"{error.strerror or error}; check the folder, its rights and the space on the disk"
        ) from error
    return counts


def _write_rows(
    rows: _RowSource,
    encoder: RowEncoder,
    options: PreprocessOptions,
    counts: Counts,
    writer: PromptSetWriter,
) -> None:
    refusals = _Refusals()
    with closing(_encoded(_chunks(iter(rows)), encoder, options.workers)) as chunks:
        for chunk in chunks:
            writer.add(chunk)
            counts.add(chunk)
            for reject in chunk.rejected:
                refusals.add(reject)
    _check_result(options, counts, refusals, rows.columns)


def find_files(inputs: Sequence[str], skipped: list[str]) -> list[str]:
    """The data files among `inputs`, a folder's sorted by name; its others go to `skipped`."""
    files, problems = [], []
    endings = ", ".join(READERS)
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            inside = sorted(str(entry) for entry in path.iterdir())
            good = [entry for entry in inside if _is_readable_kind(entry)]
            skipped += [readable(entry) for entry in inside if entry not in good]
            files += good
            if not good:
                problems.append(
                    f"--input {name}: the folder must hold {endings} files, it has none"
                )
        elif not path.exists():
            problems.append(f"--input {name}: no such file or folder; correct the path")
        elif path.suffix.lower() not in READERS:
            problems.append(
                f"--input {name}: a data file must end in {endings}, not in {path.suffix!r}; "
                "convert or rename it"
            )
        else:
            files.append(name)
    if problems:
        raise UserError([readable(problem) for problem in problems])
    return files


def readable(path: str) -> str:
    """The path as text, also where the locale could not decode its bytes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _is_readable_kind(entry: str) -> bool:
    return Path(entry).suffix.lower() in READERS and Path(entry).is_file()


def _checked_prefix(options: PreprocessOptions) -> Path:
    shown = f"--output-prefix={readable(options.output_prefix)}"
    if not os.path.basename(options.output_prefix):
        raise UserError(f"{shown} must end in a name, not in a folder; add a name")
    prefix = Path(os.path.abspath(os.path.expanduser(options.output_prefix)))
    found = existing_files(prefix)
    if found and not options.overwrite:
        raise UserError(
            f"{shown} must be new, {readable(found[0].name)} exists; take another prefix or give "
            "--overwrite"
        )
    return prefix


class _RowSource:
    """The rows of all files, counted, with the names of all columns seen."""

    def __init__(
        self, files: list[str], max_rows: int | None, counts: Counts, progress: Progress
    ) -> None:
        self._files, self._max_rows = files, max_rows
        self._counts, self._progress = counts, progress
        self._ids: set[str] = set()
        self.columns: dict[str, None] = {}  # in the order of their first row

    def __iter__(self) -> Iterator[NumberedRow]:
        return islice(self._all(), self._max_rows)

    def _all(self) -> Iterator[NumberedRow]:
        for file in self._files:
            name, before = readable(file), self._counts.rows_read
            for number, row in self._rows_of(file):
                self._counts.rows_read += 1
                if not isinstance(row, BadRow):
                    if not row.keys() <= self.columns.keys():
                        self.columns |= dict.fromkeys(row)
                    self._note_id(row.get("id"))
                yield NumberedRow(name, number, row)
                self._progress(self._counts.rows_read)
            if self._counts.rows_read == before:
                self._counts.empty_files.append(name)

    def _rows_of(self, file: str) -> Iterator[tuple[int, Any]]:
        try:
            if not os.path.isfile(file) or os.path.getsize(file):  # an empty file is of no type
                yield from scan_rows(file)
        except BrokenFile as error:
            where = f":{error.row}" if error.row else ""
            raise UserError(f"--input {readable(file)}{where}: {error}") from error
        except OSError as error:
            reason = f"cannot be read ({error.strerror or error}); check the path and its rights"
            raise UserError(f"--input {readable(file)}: {reason}") from error

    def _note_id(self, value: Any) -> None:
        if isinstance(value, (str, int)):
            self._counts.repeated_ids += repr(value) in self._ids
            self._ids.add(repr(value))


def _chunks(rows: Iterator[NumberedRow]) -> Iterator[list[NumberedRow]]:
    """The same chunks whatever the number of processes."""
    chunk: list[NumberedRow] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += _num_characters(row.row)
        if len(chunk) == CHUNK_ROWS or size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _num_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, BadRow):
        return len(value.raw)
    if isinstance(value, dict):
        return sum(map(_num_characters, value.values()))
    return sum(map(_num_characters, value)) if isinstance(value, list) else 0


def _encoded(
    chunks: Iterator[list[NumberedRow]], encoder: RowEncoder, workers: int
) -> Generator[EncodedChunk]:
    """The chunks in order; one process works in this one.

    The others are forked: they share the tokenizer, and import nothing again.
    """
    if workers == 1:
        yield from map(encoder.encode, chunks)
        return
    first = next(chunks, None)
    if first is None:
        return
    fork = get_context("fork")
    with ProcessPoolExecutor(workers, fork, start_worker, (encoder, os.getpid())) as pool:
        pending: deque[Future[EncodedChunk]] = deque([pool.submit(work, first)])
        try:
            for chunk in chunks:
                pending.append(pool.submit(work, chunk))
                if len(pending) > workers * CHUNKS_AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class _Refusals:
    """Problems of the dropped rows, by reason and file."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], FileProblems] = {}

    def add(self, reject: Rejected) -> None:
        found = self._found.setdefault((reject.reason, reject.file), FileProblems(reject.file))
        found.add(reject.row, reject.problem)

    def lines(self, only: str | None = None) -> list[str]:
        """`file:row: problem`; `only`: of this reason."""
        chosen = [f for (reason, _), f in self._found.items() if only in (None, reason)]
        return [line for found in chosen for line in found.lines()]


def _check_result(
    options: PreprocessOptions, counts: Counts, refusals: _Refusals, columns: dict[str, None]
) -> None:
    """Raises UserError when what was read must not become a data set."""
    if options.overlong is OverlongPrompts.ERROR and counts.dropped[TOO_LONG]:
        raise UserError(refusals.lines(TOO_LONG))
    if not counts.rows_written:
        reasons = ", ".join(f"{number} {reason}" for reason, number in counts.dropped.items())
        found = f"dropped: {reasons}" if reasons else "the files hold none"
        remedy = "correct --map-keys or the rows" if reasons else "name files that have rows"
        summary = f"a row must be left, of {counts.rows_read} rows none is ({found}); {remedy}"
        raise UserError([summary, *refusals.lines()])
    if options.strict and counts.dropped:
        summary = f"--strict: no row may be dropped, {counts.dropped.total()} are; mend them"
        raise UserError([summary, *refusals.lines()])
    if missing := list(_missing_columns(options.map_keys, columns)):
        raise UserError(missing)


def _missing_columns(keys: MapKeys, columns: dict[str, None]) -> Iterator[str]:
    """Columns that were asked for and that no row has; that of the response is not read."""
    for key in ("query", "history", "system"):
        column = getattr(keys, key)
        if column in (None, getattr(MapKeys, key), *columns) or column.split(".")[0] in columns:
            continue
        guess = closest(column, columns)
        remedy = f"did you mean {guess}?" if guess else 'name one, or "" for none'
        yield (
            f"--map-keys: {key} must name a column, no row has {column!r} "
            f"(there are {describe_keys(columns)}); {remedy}"
        )
