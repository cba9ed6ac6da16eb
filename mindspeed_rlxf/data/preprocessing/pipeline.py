"""Make an indexed data set of files: read rows, tokenize in processes, write in order."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.data.files import fault
from mindspeed_rlxf.data.handlers import DEFAULT_HANDLER, HANDLERS, LABELS, Output
from mindspeed_rlxf.data.preprocessing.map_keys import Keys, MapKeys, missing_columns
from mindspeed_rlxf.data.preprocessing.row_encoder import (
    TOO_LONG,
    EncodedChunk,
    NumberedRow,
    RowEncoder,
)
from mindspeed_rlxf.data.preprocessing.row_source import (
    Counts,
    Progress,
    find_files,
    read_chunks,
)
from mindspeed_rlxf.data.preprocessing.writer import (
    PromptSetWriter,
    existing_files,
    exists_problem,
    report_write_errors,
)
from mindspeed_rlxf.data.prompt_encoder import PromptEncoder
from mindspeed_rlxf.data.sidecar import Sidecar, TokenizerId
from mindspeed_rlxf.data.tokenizer import load_slow_tokenizer, load_tokenizer, vocabulary_hash

TOKENIZER = "--tokenizer-name-or-path"
CHUNKS_AHEAD = 2  # per process, so that memory stays bounded
WATCH_S = 0.5

_encoder: RowEncoder | None = None  # of a worker process


@dataclass(frozen=True)
class PreprocessOptions:
    """The flags of the command.

    max_prompt_length:  in tokens, None = any; for conversations and pairs the longest sequence
    overlong:           whether longer prompts are dropped, cut or an error
    max_samples:        number of rows to read, None = all
    strict:             no row may be dropped
    overwrite:          replace an older data set of the prefix
    additional_columns: columns of the rows to keep beside the handler's own, None = all
    append_eod:         append the tokenizer's EOS to conversations that do not end with it
    allow_special_tokens: read special tokens that the text of a row spells as tokens
    slow_tokenizer:     use the tokenizer written in Python, if transformers has it
    """

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer_path: str
    template: str = "empty"
    map_keys: Keys = field(default_factory=MapKeys)
    handler: str = DEFAULT_HANDLER
    workers: int = 1
    max_prompt_length: int | None = None
    overlong: OverlongPrompts = OverlongPrompts.DROP
    max_samples: int | None = None
    strict: bool = False
    overwrite: bool = False
    additional_columns: tuple[str, ...] | None = None
    append_eod: bool = False
    slow_tokenizer: bool = False
    allow_special_tokens: bool = False


def preprocess(options: PreprocessOptions, progress: Progress = lambda rows: None) -> Counts:
    """Write the data set of `options.output_prefix`, complete or not at all; return its counts.

    progress: called after each row with the number of rows read so far.
    Unusable rows are dropped and written to a file of rejected rows. Raises UserError for files
    that cannot be read or written, an existing data set without `overwrite`, named columns that
    are absent, when no row is left, and when a row is dropped with `strict` (or is too long with
    `overlong` ERROR); BrokenProcessPool when a worker process is killed.
    """
    shown = options.output_prefix
    if not os.path.basename(shown):
        rule = "must end in a name, not in a folder"
        raise UserError(Problem("--output-prefix", rule, shown, "add a name"))
    prefix = Path(os.path.abspath(os.path.expanduser(shown)))
    existing = existing_files(prefix)
    if existing and not options.overwrite:
        raise UserError(exists_problem(shown, existing[0].name))
    counts = Counts()
    files = find_files(options.inputs, counts.skipped)
    if options.slow_tokenizer:
        tokenizer, counts.not_slow = load_slow_tokenizer(options.tokenizer_path, TOKENIZER)
    else:
        tokenizer = load_tokenizer(options.tokenizer_path, TOKENIZER)
    handler = HANDLERS[options.handler]
    eos, unknown = tokenizer.eos_token_id, tokenizer.unk_token_id
    if options.append_eod and eos is None:
        rule = "needs the tokenizer's EOS token, it has none"
        remedy = "set eos_token in its tokenizer_config.json or leave --append-eod out"
        raise UserError(Problem("--append-eod", rule, remedy=remedy))
    encoder = RowEncoder(
        PromptEncoder(
            tokenizer, options.template, handler.has_responses, options.allow_special_tokens
        ),
        options.map_keys,
        handler,
        options.max_prompt_length,
        options.overlong,
        None if options.additional_columns is None else {*options.additional_columns, LABELS},
        end_id=eos if options.append_eod else None,
        unknown_id=None if unknown == eos else unknown,  # some tokenizers have one for both
    )
    rows = read_chunks(files, options.max_samples, counts, progress)
    with report_write_errors(str(prefix)), PromptSetWriter(prefix, handler) as writer:
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
            counts=counts.as_dict(),
        )
        writer.commit(sidecar, has_rejected=bool(counts.dropped))
    return counts


def _encode_chunks(
    chunks: Iterator[list[NumberedRow]], encoder: RowEncoder, workers: int
) -> Generator[EncodedChunk]:
    """Yield the encoded chunks in order. With `workers` 1, this process encodes.

    More workers are forked, so that they share the loaded tokenizer.
    """
    if workers == 1:
        yield from map(encoder.encode, chunks)
        return
    fork, pending = get_context("fork"), deque[Future[EncodedChunk]]()
    with ProcessPoolExecutor(workers, fork, _start_worker, (encoder, os.getpid())) as pool:
        try:
            for chunk in chunks:
                pending.append(pool.submit(_encode_in_worker, chunk))
                if len(pending) > workers * CHUNKS_AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(encoder: RowEncoder, parent: int) -> None:
    global _encoder
    _encoder = encoder
    gc.disable()  # a chunk's many small objects have no cycles, and looking for them costs 5%
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)


def _encode_in_worker(rows: Sequence[NumberedRow]) -> EncodedChunk:
    assert _encoder is not None, "_start_worker runs first"
    return _encoder.encode(rows)


def _check_result(options: PreprocessOptions, counts: Counts) -> None:
    """Raise UserError if the rows do not make the data set that the options ask for."""
    if options.overlong is OverlongPrompts.ERROR and counts.dropped[TOO_LONG]:
        raise UserError(counts.list_problems(TOO_LONG))
    if not counts.rows_written:
        reasons = ", ".join(f"{number} {reason}" for reason, number in counts.dropped.items())
        found = f"dropped: {reasons}" if reasons else "the files hold none"
        remedy = "correct --map-keys or the rows" if reasons else "name files that have rows"
        summary = fault(f"a row must be left, of {counts.rows_read} rows none is ({found})", remedy)
        raise UserError([summary, *counts.list_problems()])
    if options.strict and counts.dropped:
        rule = f"no row may be dropped, {counts.dropped.total()} are"
        summary = Problem("--strict", rule, remedy="mend them", colon=True)
        raise UserError([summary, *counts.list_problems()])
    handler, extra = HANDLERS[options.handler], options.additional_columns or ()
    own = {LABELS} if handler.output is Output.ANSWERED else set()
    others = [column for column in extra if column not in own]
    problems = list(missing_columns(options.map_keys, handler, counts.columns, others))
    response = getattr(options.map_keys, "response", "")
    if own & counts.columns.keys() and response not in (None, LABELS):
        rule = f"writes the answers as column {LABELS!r}, which the rows have already"
        problems.append(Problem(handler.name, rule, remedy='map "response" to it or rename it'))
    if problems:
        raise UserError(problems)
