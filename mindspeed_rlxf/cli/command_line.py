"""What the commands share: option parsing, `error:` lines, UTF-8 output and progress."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

from mindspeed_rlxf.config.problems import Problem, UserError, closest
from mindspeed_rlxf.reporting.console import use_utf8

Option: TypeAlias = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **settings: Any) -> Option:
    """Return the arguments of `ArgumentParser.add_argument` for one option."""
    return names, settings


class Parser(argparse.ArgumentParser):
    """Argument parser that raises UserError for a bad command line, where argparse would exit.

    --help still prints the help and exits.
    """

    def __init__(self, options: Iterable[Option], **settings: Any) -> None:
        super().__init__(**settings)
        for names, each in options:
            self.add_argument(*names, **each)

    def error(self, message: str) -> NoReturn:
        raise UserError(Problem("", message, remedy="see --help"))


def unknown_options(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> list[Problem]:
    """Return a problem for each word in `unknown`.

    For a word with a leading `-` it names the parser's most similar option, if one is similar.
    unknown: the words that `parse_known_args` could not parse
    """
    options = [option for action in parser._actions for option in action.option_strings]
    problems = []
    for word in unknown:
        flag = word.split("=")[0]
        guess = closest(flag, options) if flag.startswith("-") else None
        problems.append(
            Problem(
                word,
                "no such option",
                remedy=f"did you mean {guess}?" if guess else "remove it; --help lists the options",
                colon=True,
            )
        )
    return problems


def fail(problems: Sequence[Problem], code: int = 2) -> int:
    """Print an `error:` line for each problem to stderr; return `code`, the exit code."""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return code


def use_utf8_output() -> None:
    """Make sys.stdout and sys.stderr write UTF-8 in every locale."""
    for stream in (sys.stdout, sys.stderr):
        use_utf8(stream)


@contextmanager
def progress_bar(print_line: Callable[..., None], **options: Any) -> Iterator[Callable[..., None]]:
    """Yield a function to call with the progress so far: (done, total), or (done) alone.

    If stderr is a terminal, it moves a tqdm bar there (made with `options`); else it is
    `print_line`.
    """
    if not sys.stderr.isatty():
        yield print_line
        return
    from tqdm import tqdm  # here, as the process that supervises a run imports this module too

    with tqdm(unit_scale=True, file=sys.stderr, **options) as bar:

        def move(done: int, total: int | None = None) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield move
