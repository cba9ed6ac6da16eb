"""What the commands share: option parsing, `error:` lines, UTF-8 output and progress."""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeAlias

from mindspeed_rlxf.config.problems import Problem, UserError, closest
from mindspeed_rlxf.reporting.console import use_utf8

P = ParamSpec("P")
LINE_S = 5.0  # shortest time between lines of progress
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
    """Return a problem for each word that `parse_known_args` could not parse."""
    options = [option for action in parser._actions for option in action.option_strings]
    problems = []
    for word in unknown:
        flag = word.split("=")[0]
        guess = closest(flag, options) if flag.startswith("-") else None
        remedy = f"did you mean {guess}?" if guess else "remove it; --help lists the options"
        problems.append(Problem(word, "no such option", remedy=remedy, colon=True))
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


def command(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate a command: output is UTF-8, and the user's mistakes are printed and return 2."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        use_utf8_output()
        try:
            return main(*args, **kwargs)
        except UserError as error:
            return fail(error.problems)

    return run


def number(least: int) -> Callable[[str], int]:
    """Return argparse's `type` of an integer option that is at least `least`."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} must be {least} or more")
        return int(text)

    return number


@contextmanager
def progress_bar(unit: str, step: int = 1) -> Iterator[Callable[..., None]]:
    """Yield a function to call with the progress so far: (done, total), or (done) alone.

    It moves a tqdm bar if stderr is a terminal. Else it prints a line every LINE_S seconds if
    `step` more units are done.
    """
    from tqdm import tqdm  # here, as the process that supervises a run imports this module too

    started = last_s = time.monotonic()
    printed = 0
    with tqdm(unit=unit, unit_scale=True, file=sys.stderr, disable=None) as bar:

        def move(done: int, total: int | None = None) -> None:
            nonlocal last_s, printed
            now, size = time.monotonic(), tqdm.format_sizeof
            if not bar.disable:
                bar.total = total
                bar.update(done - bar.n)
            elif now - last_s >= LINE_S and done - printed >= step:
                last_s, printed = now, done
                goal = f" of {size(total)}" if total else ""
                print(f"{size(done)}{goal}{unit} in {now - started:.1f} s", file=sys.stderr)

        yield move
