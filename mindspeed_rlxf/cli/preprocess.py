"""`preprocess`: files of rows become an indexed prompt data set.

Exit codes: 0 = written; 2 = the user's mistake, one `error:` line per problem; 75 = interrupted;
1 = a process was lost. Unless it is 0, no data set is left.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from tqdm import tqdm

from mindspeed_rlxf.cli.command_line import Parser, print_problems, speak_utf8
from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.suggest import closest
from mindspeed_rlxf.data.conversation import MapKeys, parse_map_keys
from mindspeed_rlxf.data.preprocess import (
    HANDLER,
    Counts,
    PreprocessOptions,
    Progress,
    preprocess,
    readable,
)
from mindspeed_rlxf.data.templates import TEMPLATES

TOKENIZER_TYPE = "PretrainedFromHF"
OVERLONG = {policy.value.replace("_", "-"): policy for policy in OverlongPrompts}
EPILOG = (
    "A template tokenizes text that spells a special token as ordinary text; in `empty` and `trl`, "
    "where the text is the whole prompt, it is the special token."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the data set, prints what became of the rows, and returns the exit code."""
    speak_utf8()
    # Processes are the parallelism here, and no accelerator is used: its library is not loaded.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    try:
        arguments = _parse(argv)
        options = _options(arguments)
        with _progress(arguments.log_interval) as progress:
            counts = preprocess(options, progress)
    except UserError as error:
        print_problems(error.problems)
        return 2
    except KeyboardInterrupt:
        print_problems(["interrupted, nothing is written; run the same command again"])
        return 75
    except BrokenProcessPool:
        print_problems(["a worker process was killed, perhaps for memory; use fewer --workers"])
        return 1
    _report(counts, arguments.output_prefix)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="preprocess",
        description="Rows of files become an indexed prompt data set (data.data_path).",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="parquet, json or jsonl files, or folders")
    add("--tokenizer-name-or-path", required=True, help="Hugging Face folder of the tokenizer")
    add("--tokenizer-type", default=TOKENIZER_TYPE, help=f"{TOKENIZER_TYPE}, the only one")
    add("--output-prefix", required=True, help="folder and start of the name of every file")
    add("--workers", type=int, default=1, help="processes that tokenize (1)")
    add("--log-interval", type=int, default=100, help="rows between lines of progress (100)")
    add("--handler-name", default=HANDLER, help=f"{HANDLER}, the only one")
    add("--prompt-type", default="empty", help=f"template: {', '.join(TEMPLATES)} (empty)")
    add("--map-keys", default="{}", help=f"JSON, {_default_keys()}; an empty name = unused")
    add("--seq-length", type=int, help="longest prompt, tokens (any)")
    add("--overlong", help=f"what becomes of longer ones: {', '.join(OVERLONG)} (drop)")
    add("--max-samples", type=int, help="rows that are read (all)")
    add("--strict", action="store_true", help="a dropped row is an error")
    add("--overwrite", action="store_true", help="replace a data set of this prefix")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [action.option_strings[-1] for action in parser._actions if action.option_strings]
        raise UserError([_unknown(word, flags) for word in unknown])
    return arguments


def _default_keys() -> str:
    keys = MapKeys()
    named = {key: getattr(keys, key) or "" for key in MapKeys.__dataclass_fields__}
    return ", ".join(f"{key}={column!r}" for key, column in named.items())


def _unknown(word: str, flags: Sequence[str]) -> str:
    flag = word.split("=")[0]
    guess = closest(flag, flags) if flag.startswith("-") else None
    remedy = f"did you mean {guess}?" if guess else f"remove it, or use {', '.join(flags)}"
    return f"{word}: no such option; {remedy}"


def _options(arguments: argparse.Namespace) -> PreprocessOptions:
    """The typed flags; raises UserError with every wrong one."""
    problems = [
        *_one_of("--handler-name", arguments.handler_name, [HANDLER]),
        *_one_of("--tokenizer-type", arguments.tokenizer_type, [TOKENIZER_TYPE]),
        *_one_of("--prompt-type", arguments.prompt_type, TEMPLATES),
        *_one_of("--overlong", arguments.overlong or "drop", OVERLONG),
    ]
    for flag in ("workers", "log_interval", "seq_length", "max_samples"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            name = flag.replace("_", "-")
            problems.append(f"--{name}={value} must be at least 1; use 1 or more")
    if arguments.overlong and arguments.seq_length is None:
        problems.append(
            f"--overlong={arguments.overlong} needs --seq-length; give the longest prompt in tokens"
        )
    keys = MapKeys()
    try:
        keys = parse_map_keys(arguments.map_keys)
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(problems)
    return PreprocessOptions(
        inputs=tuple(arguments.input),
        output_prefix=arguments.output_prefix,
        tokenizer_path=arguments.tokenizer_name_or_path,
        template=arguments.prompt_type,
        map_keys=keys,
        workers=arguments.workers,
        max_prompt_length=arguments.seq_length,
        overlong=OVERLONG[arguments.overlong or "drop"],
        max_samples=arguments.max_samples,
        strict=arguments.strict,
        overwrite=arguments.overwrite,
    )


def _one_of(flag: str, value: str, known: Collection[str]) -> list[str]:
    if value in known:
        return []
    guess = closest(value, known) or next(iter(known))
    return [f"{flag}={value} must be one of {', '.join(known)}; did you mean {guess}?"]


@contextmanager
def _progress(log_interval: int) -> Iterator[Progress]:
    """A bar on a terminal, elsewhere a line every `log_interval` rows."""
    started = time.monotonic()

    def line(rows: int) -> None:
        if rows % log_interval == 0:
            print(f"{rows} rows read in {time.monotonic() - started:.1f} s", file=sys.stderr)

    if not sys.stderr.isatty():
        yield line
        return
    with tqdm(unit=" rows", unit_scale=True) as bar:
        yield lambda rows: bar.update(rows - bar.n)


def _report(counts: Counts, prefix: str) -> None:
    for file in counts.skipped:
        print(f"note: {file} is skipped: of no type that is read", file=sys.stderr)
    for file in counts.empty_files:
        print(f"note: {file} holds no rows", file=sys.stderr)
    lines = {"rows read": counts.rows_read, "rows written": counts.rows_written}
    lines |= {f"dropped, {reason}": number for reason, number in counts.dropped.most_common()}
    notes = {"cut to --seq-length": counts.cut, "with an id seen before": counts.repeated_ids}
    lines |= {name: number for name, number in notes.items() if number}
    for name, number in lines.items():
        print(f"{name:<24} {number:>10}")
    print(f"written: {readable(prefix)}_packed_*")
    if counts.dropped:
        print(f"dropped rows: {readable(prefix)}_rejected.jsonl")
