"""`preprocess`: turn row files into an indexed data set.

Exit codes: 0 = written; 2 = user mistake, one `error:` line per problem; 75 = interrupted; 1 = a
worker process was killed. Unless it is 0, no new data set is left.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool

from mindspeed_rlxf.cli.command_line import (
    Parser,
    command,
    fail,
    number,
    option,
    program_name,
    progress_bar,
    unknown_options,
)
from mindspeed_rlxf.compat.mindspeed_llm.flags import PREPROCESS_FLAGS, add_flags, check_flags
from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.config.problems import Problem, UserError, closest
from mindspeed_rlxf.data.files import fault
from mindspeed_rlxf.data.handlers import (
    DEFAULT_HANDLER,
    HANDLERS,
    REFUSED_HANDLERS,
    Keys,
    MapKeys,
    parse_map_keys,
)
from mindspeed_rlxf.data.preprocessing.pipeline import Counts, PreprocessOptions, preprocess
from mindspeed_rlxf.data.templates import TEMPLATES

OVERLONG = {policy.value.replace("_", "-"): policy for policy in OverlongPrompts}
EPILOG = (
    "Text that spells a special token is ordinary text, unless --allow-special-tokens is given. "
    "Other flags of the older toolkit are refused, or accepted with a note that says why they have "
    "no effect."
)

DEFAULT_KEYS = ", ".join(f"{key}={column or ''!r}" for key, column in MapKeys())
OPTIONS = (
    option("--input", nargs="+", required=True, help="parquet, json or jsonl files, or folders"),
    option("--tokenizer-name-or-path", help="Hugging Face folder of the tokenizer (required)"),
    option("--tokenizer-type", choices=["PretrainedFromHF"], help="the only one"),
    option("--output-prefix", required=True, help="folder and start of the name of every file"),
    option("--workers", type=number(1), default=1, help="processes that tokenize (1)"),
    option(
        "--log-interval",
        type=number(1),
        default=100,
        help="rows between lines of progress, at least",
    ),
    option("--handler-name", default=DEFAULT_HANDLER, help=f"{', '.join(HANDLERS)} (the first)"),
    option("--prompt-type", choices=TEMPLATES, default="empty", help="template (empty)"),
    option("--map-keys", default="{}", help=f"JSON, {DEFAULT_KEYS}; an empty name = unused"),
    option("--dataset-additional-keys", nargs="*", help="further columns to keep (all)"),
    option("--seq-length", type=number(1), help="longest prompt in tokens (any)"),
    option("--overlong", choices=OVERLONG, help="what to do with longer ones (drop)"),
    option("--max-samples", type=number(1), help="rows that are read (all)"),
    option(
        "--allow-special-tokens",
        action="store_true",
        help="special tokens that the text of a row spells are tokens",
    ),
    option("--strict", action="store_true", help="a dropped row is an error"),
    option("--overwrite", action="store_true", help="replace a data set of this prefix"),
)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Write the data set, print the counts of written and dropped rows, and return 0.

    Errors are printed, not raised: returns 2 for mistakes, 75 if interrupted, 1 if a worker process
    was killed. Sets TOKENIZERS_PARALLELISM and TORCH_DEVICE_BACKEND_AUTOLOAD in this process.
    """
    # Megatron, whose builder writes the data set, says at every import that Apex is missing.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    # Processes are the parallelism here, and no accelerator is used: its library is not loaded.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    parser = Parser(
        OPTIONS,
        prog=program_name("preprocess"),
        description="Rows of files become an indexed prompt data set (data.data_path).",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    add_flags(parser, PREPROCESS_FLAGS)
    try:
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:
            return fail(unknown_options(parser, unknown))
        options = _check_options(arguments)
        with progress_bar(" rows", arguments.log_interval) as progress:
            counts = preprocess(options, progress)
    except KeyboardInterrupt:
        return fail([fault("interrupted, nothing is written", "run the same command again")], 75)
    except BrokenProcessPool:
        return fail(
            [fault("a worker process was killed, perhaps for memory", "use fewer --workers")], 1
        )
    _print_counts(counts, arguments.output_prefix)
    return 0


def _check_options(arguments: argparse.Namespace) -> PreprocessOptions:
    """Check and convert the flags; print those without effect. Raises UserError for wrong ones."""
    problems, ignored = check_flags(arguments, PREPROCESS_FLAGS)
    if arguments.tokenizer_name_or_path is None:
        problems.append(Problem("--tokenizer-name-or-path", "is required", remedy="give a folder"))
    name = arguments.handler_name
    if name not in HANDLERS:
        guess = closest(name, HANDLERS) or DEFAULT_HANDLER
        unknown = f"there is no such handler; did you mean {guess}?"
        reason = REFUSED_HANDLERS.get(name) or unknown
        problems.append(Problem("--handler-name", f"is not supported: {reason}", name))
    handler = HANDLERS.get(name, HANDLERS[DEFAULT_HANDLER])
    keys: Keys = handler.keys()
    try:
        keys = parse_map_keys(arguments.map_keys, handler)
    except UserError as error:
        problems += error.problems
    if arguments.overlong and arguments.seq_length is None:
        remedy = "give the longest prompt in tokens"
        problems.append(Problem("--overlong", "needs --seq-length", arguments.overlong, remedy))
    if problems:
        raise UserError(problems)
    for flag, reason in ignored.items():
        _note(f"{flag} has no effect: {reason}")
    additional = arguments.dataset_additional_keys
    return PreprocessOptions(
        inputs=tuple(arguments.input),
        output_prefix=arguments.output_prefix,
        tokenizer_path=arguments.tokenizer_name_or_path,
        template=arguments.prompt_type,
        map_keys=keys,
        handler=handler.name,
        workers=arguments.workers,
        max_prompt_length=arguments.seq_length,
        overlong=OVERLONG[arguments.overlong or "drop"],
        max_samples=arguments.max_samples,
        strict=arguments.strict,
        overwrite=arguments.overwrite,
        additional_columns=None if additional is None else tuple(additional),
        allow_special_tokens=arguments.allow_special_tokens,
    )


def _print_counts(counts: Counts, prefix: str) -> None:
    """Print row counts, and the paths to the data set and to dropped rows, if any.

    Notes on skipped files go to stderr.
    """
    for file in counts.skipped:
        _note(f"{file} is skipped: files of its type are not read")
    lines = {"rows read": counts.rows_read, "rows written": counts.rows_written}
    for reason, count in counts.dropped.most_common():
        lines[f"dropped, {reason}"] = count
    if counts.cut:
        lines["truncated (--seq-length)"] = counts.cut
    for name, count in lines.items():
        print(f"{name:<24} {count:>10}")
    print(f"written: {prefix}_packed_*")
    if counts.dropped:
        print(f"dropped rows: {prefix}_rejected.jsonl")


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
