"""Convert files to an indexed data set: read rows, tokenize in processes, write in order."""

import ctypes
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.data.files import READERS, FileProblems, fault, read_rows
from mindspeed_rlxf.data.handlers import (
    DEFAULT_HANDLER,
    HANDLERS,
    LABELS,
    Keys,
    MapKeys,
    missing_columns,
)
from mindspeed_rlxf.data.preprocessing.row_encoder import (
    TOO_LONG,
    EncodedChunk,
    NumberedRow,
    RowEncoder,
)
from mindspeed_rlxf.data.preprocessing.writer import (
    PromptSetWriter,
    existing_files,
    partial_folder,
)
from mindspeed_rlxf.data.sidecar import Sidecar, TokenizerId
from mindspeed_rlxf.data.templates import PromptEncoder
from mindspeed_rlxf.data.tokenizer import load_tokenizer, vocabulary_hash

CHUNK_ROWS = 512

Progress = Callable[[int], None]


@dataclass
class Counts:
    """How many rows were read, written, dropped and truncated."""

    rows_read: int = 0
    rows_written: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    cut: int = 0
    num_tokens: int = 0
    skipped: list[str] = field(default_factory=list)  # folder entries other than data files
    # (reason, file) -> row problems
    refusals: dict[tuple[str, str], FileProblems] = field(default_factory=dict)
    columns: dict[str, None] = field(default_factory=dict)  # over all rows, in order of appearance

    def add(self, chunk: EncodedChunk) -> None:
        """Add an encoded chunk; `read_chunks` counts `rows_read`."""
        self.rows_written += len(chunk.token_ids)
        self.cut += chunk.num_cut
        self.num_tokens += sum(map(len, chunk.token_ids))
        for row in chunk.rejected:
            self.dropped[row.reason] += 1
            refused = self.refusals.setdefault((row.reason, row.file), FileProblems(row.file))
            refused.add(row.row, row.problem)

    def list_problems(self, only: str | None = None) -> list[Problem]:
        """Return the problems by `file:row`; `only` selects one reason for dropping."""
        problems = []
        for (reason, _), file_problems in self.refusals.items():
            if only in (None, reason):
                problems += file_problems.list_problems()
        return problems


def find_files(inputs: Sequence[str], skipped: list[str]) -> list[str]:
    """List the data files in `inputs`, which are files and folders, in that order.

    A folder's files are sorted by name; its other entries are appended to `skipped`. Raises
    UserError with every path which is neither a data file nor a folder with some.
    """
    files: list[str] = []
    problems: list[Problem] = []
    for name in inputs:
        path = Path(name)
        entries = sorted(map(str, path.iterdir())) if path.is_dir() else [name]
        num_files_before = len(files)
        for entry in entries:
            if Path(entry).suffix.lower() in READERS and Path(entry).is_file():
                files.append(entry)
            else:
                skipped.append(entry)
        if len(files) == num_files_before:
            rule = "no such file or folder"
            if path.exists():
                rule = f"it must be a {', '.join(READERS)} file, or a folder that has some"
            problems.append(Problem(f"--input {name}", rule, remedy="correct the path", colon=True))
    if problems:
        raise UserError(problems)
    return files


def read_chunks(
    files: Sequence[str], max_rows: int | None, counts: Counts, progress: Progress
) -> Iterator[list[NumberedRow]]:
    """Yield rows from all files, at most `max_rows`, in lists of CHUNK_ROWS.

    Updates `counts`, and calls `progress` after each row.
    """

    def read_all() -> Iterator[NumberedRow]:
        for file in files:
            for number, row in read_rows(file, f"--input {file}"):
                counts.rows_read += 1
                if isinstance(row, dict):
                    counts.columns |= dict.fromkeys(row)
                yield NumberedRow(file, number, row)
                progress(counts.rows_read)

    rows = islice(read_all(), max_rows)
    while True:
        chunk = list(islice(rows, CHUNK_ROWS))
        if not chunk:
            return
        yield chunk


CHUNKS_AHEAD = 2  # per process, to bound memory

_encoder: RowEncoder | None = None  # in a worker process


@dataclass(frozen=True)
class PreprocessOptions:
    """The command's flags."""

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer_path: str
    template: str = "empty"
    map_keys: Keys = field(default_factory=MapKeys)
    handler: str = DEFAULT_HANDLER
    workers: int = 1
    max_prompt_length: int | None = None  # in tokens; None = any
    overlong: OverlongPrompts = OverlongPrompts.DROP
    max_samples: int | None = None  # rows to read, None = all
    strict: bool = False  # no row may be dropped
    overwrite: bool = False  # replace an older data set
    additional_columns: tuple[str, ...] | None = None  # beside the handler's own, None = all
    allow_special_tokens: bool = False  # also those spelled in a row's text


def preprocess(options: PreprocessOptions, progress: Progress = lambda rows: None) -> Counts:
    """Write the data set `options.output_prefix`, complete or not at all; return its counts.

    Unusable rows are dropped and written to a file. `progress` gets the number of rows read.

    Raises:
        UserError: wrong files or columns, an existing data set without `overwrite`, no row left, or
            dropped rows with `strict` (or too long ones with `overlong` ERROR).
        BrokenProcessPool: a worker process was killed.
    """
    flag = "--output-prefix"
    if not os.path.basename(options.output_prefix):
        rule = "must end in a name, not in a folder"
        raise UserError(Problem(flag, rule, options.output_prefix, "add a name"))
    prefix = Path(os.path.abspath(os.path.expanduser(options.output_prefix)))
    existing = existing_files(prefix)
    if existing and not options.overwrite:
        rule = f"must be new, {existing[0].name} exists"
        remedy = "take another prefix or give --overwrite"
        raise UserError(Problem(flag, rule, options.output_prefix, remedy))
    counts = Counts()
    files = find_files(options.inputs, counts.skipped)
    tokenizer = load_tokenizer(options.tokenizer_path, "--tokenizer-name-or-path")
    handler = HANDLERS[options.handler]
    encoder = RowEncoder(
        PromptEncoder(tokenizer, options.template, options.allow_special_tokens),
        options.map_keys,
        handler,
        options.max_prompt_length,
        options.overlong,
        None if options.additional_columns is None else {*options.additional_columns, LABELS},
    )
    rows = read_chunks(files, options.max_samples, counts, progress)
    with partial_folder(prefix) as folder:
        writer = PromptSetWriter(folder)
        with closing(_encode_chunks(rows, encoder, options.workers)) as chunks:
            for chunk in chunks:
                writer.add(chunk)
                counts.add(chunk)
        _check_result(options, counts)
        sidecar = Sidecar(
            handler=handler.name,
            template=options.template,
            allow_special_tokens=options.allow_special_tokens,
            stop_token_ids=tuple(encoder.prompts.stop_token_ids),
            tokenizer=TokenizerId(path=options.tokenizer_path, sha256=vocabulary_hash(tokenizer)),
            columns=writer.columns(),
            counts={
                "rows_read": counts.rows_read,
                "rows_written": counts.rows_written,
                "dropped": dict(sorted(counts.dropped.items())),
                "cut": counts.cut,
                "tokens": counts.num_tokens,
            },
        )
        writer.commit(prefix, sidecar, has_rejected=bool(counts.dropped))
    return counts


def _encode_chunks(
    chunks: Iterator[list[NumberedRow]], encoder: RowEncoder, workers: int
) -> Generator[EncodedChunk]:
    """Yield the encoded chunks in order; with `workers` 1, encoded by this process.

    More workers are forked, so they share the loaded tokenizer.
    """
    if workers == 1:
        yield from map(encoder.encode, chunks)
        return
    pending: deque[Future[EncodedChunk]] = deque()
    pool = ProcessPoolExecutor(workers, get_context("fork"), _start_worker, (encoder,))
    try:
        for chunk in chunks:
            pending.append(pool.submit(_encode_in_worker, chunk))
            if len(pending) > workers * CHUNKS_AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(encoder: RowEncoder) -> None:
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # else workers outlive a killed parent: they wait on its pipe
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _encode_in_worker(rows: Sequence[NumberedRow]) -> EncodedChunk:
    assert _encoder is not None, "_start_worker runs first"
    return _encoder.encode(rows)


def _check_result(options: PreprocessOptions, counts: Counts) -> None:
    """Raise UserError if the rows do not make the data set requested by the options."""
    if options.overlong is OverlongPrompts.ERROR and counts.dropped[TOO_LONG]:
        raise UserError(counts.list_problems(TOO_LONG))
    if not counts.rows_written:
        rule = f"a row must be left, of {counts.rows_read} rows none is "
        if counts.dropped:
            reasons = ", ".join(f"{number} {reason}" for reason, number in counts.dropped.items())
            summary = fault(f"{rule}(dropped: {reasons})", "correct --map-keys or the rows")
        else:
            summary = fault(f"{rule}(the files hold none)", "name files that have rows")
        raise UserError([summary, *counts.list_problems()])
    if options.strict and counts.dropped:
        rule = f"no row may be dropped, {counts.dropped.total()} are"
        summary = Problem("--strict", rule, remedy="mend them", colon=True)
        raise UserError([summary, *counts.list_problems()])
    handler = HANDLERS[options.handler]
    extra_columns = list(options.additional_columns or ())
    if handler.writes_answers:
        extra_columns = [column for column in extra_columns if column != LABELS]
    problems = list(missing_columns(options.map_keys, handler, counts.columns, extra_columns))
    response = getattr(options.map_keys, "response", "")
    is_taken = LABELS in counts.columns and response not in (None, LABELS)
    if handler.writes_answers and is_taken:
        rule = f"writes the answers as column {LABELS!r}, which the rows have already"
        problems.append(Problem(handler.name, rule, remedy='map "response" to it or rename it'))
    if problems:
        raise UserError(problems)
