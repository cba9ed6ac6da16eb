"""Shared by the commands: options, `error:` lines and progress."""

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
        for names, option_settings in options:
            self.add_argument(*names, **option_settings)

    def error(self, message: str) -> NoReturn:
        """Raise the message as a UserError."""
        raise UserError(Problem("", message, remedy="see --help"))


def program_name(name: str) -> str:
    """Return how the command `name` was started: by its script, or as `mindspeed-rlxf NAME`."""
    script = Path(sys.argv[0]).name
    return script if script.endswith(".py") else f"mindspeed-rlxf {name}"


def unknown_options(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> list[Problem]:
    """Return a problem for each word left over by `parse_known_args`."""
    options: list[str] = []
    for action in parser._actions:
        options += action.option_strings
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


def number(minimum: int) -> Callable[[str], int]:
    """Return argparse's `type` for an integer option with a lower bound."""

    def number(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} must be {minimum} or more")
        return int(text)

    return number


@contextmanager
def progress_bar(unit: str, step: int = 1) -> Iterator[Callable[..., None]]:
    """Yield a function to call with the progress so far: (done, total), or (done) alone.

    It moves a tqdm bar on stderr. Outside a terminal the bar is written every LINE_S seconds at
    most, after `step` more units.
    """
    from tqdm import tqdm  # here, as the process that supervises a run imports this module too

    intervals: dict[str, Any] = {}
    if not sys.stderr.isatty():
        intervals = {"delay": LINE_S, "mininterval": LINE_S, "miniters": step}
    with tqdm(unit=unit, unit_scale=True, **intervals) as bar:

        def move(num_done: int, total: int | None = None) -> None:
            bar.total = total
            bar.update(num_done - bar.n)

        yield move
