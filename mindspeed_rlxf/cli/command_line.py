"""Shared by the commands: options, the older toolkit's flags, `error:` lines and progress."""

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeAlias

from mindspeed_rlxf.config.problems import Problem, UserError, closest
from mindspeed_rlxf.reporting.console import use_utf8

P = ParamSpec("P")
LINE_S = 30.0  # shortest time between two writes of progress to a file
Option: TypeAlias = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **settings: Any) -> Option:
    """Return one option's arguments for `ArgumentParser.add_argument`."""
    return names, settings


class Parser(argparse.ArgumentParser):
    """Argument parser raising UserError for a bad command line; argparse would exit.

    --help still prints the help and exits.
    """

    def __init__(self, options: Iterable[Option], **settings: Any) -> None:
        super().__init__(**settings)
        for names, each in options:
            self.add_argument(*names, **each)

    def error(self, message: str) -> NoReturn:
        """Raise the message as a UserError."""
        raise UserError(Problem("", message, remedy="see --help"))


def program_name(name: str) -> str:
    """Return how the command `name` was started: by its script, or as `mindspeed-rlxf NAME`."""
    script = Path(sys.argv[0]).name
    return script if script.endswith(".py") else f"mindspeed-rlxf {name}"


def unknown_options(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> list[Problem]:
    """Return a problem for each word left over by `parse_known_args`."""
    options = [option for action in parser._actions for option in action.option_strings]
    problems = []
    for word in unknown:
        flag = word.split("=")[0]
        guess = closest(flag, options) if flag.startswith("-") else None
        remedy = f"did you mean {guess}?" if guess else "remove it; --help lists the options"
        problems.append(Problem(word, "no such option", remedy=remedy, colon=True))
    return problems


def fail(problems: Sequence[Problem], code: int = 2) -> int:
    """Print an `error:` line per problem to stderr; return `code`, the exit code."""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return code


def use_utf8_output() -> None:
    """Make sys.stdout and sys.stderr write UTF-8 in every locale."""
    for stream in (sys.stdout, sys.stderr):
        use_utf8(stream)


def command(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate a command: output is UTF-8; user mistakes are printed and return 2."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        use_utf8_output()
        try:
            return main(*args, **kwargs)
        except UserError as error:
            return fail(error.problems)

    return run


def number(least: int) -> Callable[[str], int]:
    """Return argparse's `type` for an integer option with a lower bound."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} must be {least} or more")
        return int(text)

    return number


@contextmanager
def progress_bar(unit: str, step: int = 1) -> Iterator[Callable[..., None]]:
    """Yield a function to call with the progress so far: (done, total), or (done) alone.

    It moves a tqdm bar on stderr. Outside a terminal the bar is written every LINE_S seconds at
    most, after `step` more units.
    """
    from tqdm import tqdm  # here, as the process that supervises a run imports this module too

    rare = {"delay": LINE_S, "mininterval": LINE_S, "miniters": step}
    with tqdm(unit=unit, unit_scale=True, **({} if sys.stderr.isatty() else rare)) as bar:

        def move(done: int, total: int | None = None) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield move


@dataclass(frozen=True)
class OlderFlag:
    """An older toolkit's flag, without effect here or refused.

    Attributes:
        meaning: Why it has no effect, or the fix if it is refused.
        nargs: As in argparse; 0 = the flag has no value.
        allowed: Values accepted without effect; None = all, () = the flag is refused.
    """

    meaning: str
    nargs: int | str | None = None
    allowed: tuple[str, ...] | None = ()


_ignored = functools.partial(OlderFlag, allowed=None)

CONVERT_FLAGS: Mapping[str, OlderFlag] = {
    "--model-type": OlderFlag("GPT is the only one", None, ("GPT",)),
    "--loader": _ignored("the format of the source is recognised"),
    "--saver": _ignored("--save-model-type decides"),
    "--max-queue-size": _ignored("there is no queue"),
    "--no-checking": _ignored("what does not fit is always refused", 0),
    "--spec": _ignored("config.json describes the layers", "*"),
    "--ckpt-cfg-path": _ignored("config.json describes the model"),
    "--tokenizer-model": _ignored("the tokenizer is copied from beside config.json"),
    "--vocab-file": _ignored("config.json has the size of the vocabulary"),
    "--use-mcore-models": _ignored("always", 0),
    "--megatron-path": _ignored("Megatron is not needed"),
    "--load-hf-from-config": _ignored("always: weights of the original are not read", 0),
    "--load-hf-weights": _ignored("never needed", 0),
    "--w-pack": OlderFlag("no family here packs query, key and value in Hugging Face", "*"),
    "--add-dense-bias": OlderFlag("no family here has a bias in the output projection", "*"),
    "--add-output-layer-bias": OlderFlag("no family here has a bias in the output layer", "*"),
    "--embed-layernorm": OlderFlag("no family here norms the embedding", "*"),
    "--post-norm": OlderFlag("no family here norms after attention or MLP", "*"),
    "--moe-grouped-gemm": OlderFlag("experts are written one by one; train without it", "*"),
    "--moe-tp-extend-ep": OlderFlag(
        "experts are split over tensor-parallel ranks; leave it out", "*"
    ),
    "--noop-layers": OlderFlag("stages of unequal depth are given by --num-layer-list", "*"),
    "--save-to-legacy": OlderFlag("layers are written by the names of Megatron-core only", "*"),
    "--load-from-legacy": OlderFlag("layers are read by the names of Megatron-core only", "*"),
    "--load-checkpoint-loosely": OlderFlag("a checkpoint has to fit its config.json", "*"),
    "--qlora-nf4": OlderFlag("quantised weights are not written; convert without it", "*"),
    **dict.fromkeys(
        ("--save-lora-to-hf", "--lora-load", "--lora-target-modules", "--lora-r", "--lora-alpha"),
        OlderFlag("merge the adapter first", "*"),
    ),
    "--target-data-parallel-size": OlderFlag("optimizer states are not converted", "*"),
}
"""Flags in MindSpeed-LLM's convert_ckpt.py."""

_MIX = "give data.data_path several prefixes, which training shuffles"
_FILES = "name the files with --input, and their columns with --map-keys"

PREPROCESS_FLAGS: Mapping[str, OlderFlag] = {
    "--streaming": _ignored("rows are always read as a stream", 0),
    "--cache-dir": _ignored("nothing is cached"),
    "--overwrite-cache": _ignored("nothing is cached; --overwrite replaces a data set", 0),
    "--n-subs": _ignored("the rows are not split first: --workers tokenize them"),
    "--seed": _ignored("nothing is drawn at random: rows keep their order"),
    "--tokenizer-not-use-fast": _ignored("training reads the rows with the fast tokenizer too", 0),
    "--append-eod": _ignored("prompts end with the header of the response", 0),
    "--pad-to-multiple-of": _ignored("sequences are stored without padding"),
    **dict.fromkeys(
        ("--make-vocab-size-divisible-by", "--pad-vocab-size-to"),
        _ignored("the vocabulary is padded by the model"),
    ),
    "--dataset-impl": OlderFlag("data sets are memory-mapped; leave it out", None, ("mmap",)),
    "--mix-strategy": OlderFlag(f"files are read one after the other; {_MIX}", None, ("concat",)),
    "--interleave-probs": OlderFlag(_MIX),
    "--merge-group-keys": OlderFlag(_MIX, "*"),
    "--datasets": OlderFlag(_FILES, "*"),
    "--dataset-dir": OlderFlag(_FILES),
    "--hf-datasets-params": OlderFlag(f"nothing is downloaded; {_FILES}"),
    "--script-data-dir": OlderFlag(f"no script is run; {_FILES}"),
    "--prompt-type-path": OlderFlag("templates come with the package; use --prompt-type"),
    **dict.fromkeys(
        ("--pack", "--neat-pack"), OlderFlag("training packs sequences itself; leave it out", 0)
    ),
    "--json-keys": OlderFlag(
        "the handler decides which columns are written; use --dataset-additional-keys", "*"
    ),
    **dict.fromkeys(
        ("--split-sentences", "--keep-newlines"),
        OlderFlag("it is for pre-training; leave it out", 0),
    ),
    "--placeholder-token": OlderFlag("rewards of single steps are not trained here"),
    "--reward-tokens": OlderFlag("rewards of single steps are not trained here", "*"),
    **dict.fromkeys(
        ("--vocab-file", "--merge-file", "--tokenizer-model"),
        OlderFlag("give the Hugging Face folder as --tokenizer-name-or-path"),
    ),
}
"""Flags in MindSpeed-LLM's preprocess_data.py."""


def add_flags(parser: argparse.ArgumentParser, flags: Mapping[str, OlderFlag]) -> None:
    """Add the flags to a parser, hidden in its help. Each is None if not given."""
    for name, flag in flags.items():
        kind: dict[str, Any] = {"nargs": flag.nargs}
        if flag.nargs == 0:
            kind = {"action": "store_const", "const": True}
        parser.add_argument(name, help=argparse.SUPPRESS, **kind)


def check_flags(
    arguments: argparse.Namespace, flags: Mapping[str, OlderFlag]
) -> tuple[list[Problem], dict[str, str]]:
    """Return problems for refused flags, and flag -> meaning for flags without effect."""
    problems, ignored = [], {}
    for name, flag in flags.items():
        value = getattr(arguments, name[2:].replace("-", "_"))
        if value is not None and flag.allowed is not None and value not in flag.allowed:
            shown = value if isinstance(value, str) else None
            problems.append(Problem(name, f"is not supported: {flag.meaning}", shown))
        elif value is not None:
            ignored[name] = flag.meaning
    return problems, ignored
