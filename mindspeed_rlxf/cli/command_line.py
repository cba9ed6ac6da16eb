"""Parts that the commands share: `error:` lines, exit codes, UTF-8 text and progress."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.suggest import closest
from mindspeed_rlxf.files.printable import RawStream, protect

Option: TypeAlias = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **settings: Any) -> Option:
    """Describe an option by the arguments of `ArgumentParser.add_argument`."""
    return names, settings


class Parser(argparse.ArgumentParser):
    """Reports a bad command line like any other mistake of the user."""

    def __init__(self, options: Iterable[Option], **settings: Any) -> None:
        super().__init__(**settings)
        for names, each in options:
            self.add_argument(*names, **each)

    def error(self, message: str) -> NoReturn:
        raise UserError(Problem("", message, remedy="see --help"))


def unknown_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[Problem]:
    """List a problem for each word that is no option of the parser, with the nearest option."""
    options = [option for action in parser._actions for option in action.option_strings]
    problems = []
    for word in words:
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
    """Print an `error:` line for each problem and return the exit code."""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return code


def speak_utf8() -> None:
    """Make this process print UTF-8 in every locale, and no text that controls a terminal.

    Holds for everything that the process prints, output of libraries and tracebacks included.
    """
    for stream in (sys.stdout, sys.stderr):
        protect(stream)


@contextmanager
def progress_bar(print_line: Callable[..., None], **options: Any) -> Iterator[Callable[..., None]]:
    """Yield a function of (done, total) that moves a bar on a terminal; elsewhere `print_line`."""
    if not sys.stderr.isatty():
        yield print_line
        return
    from tqdm import tqdm  # the process that supervises a run imports this module too

    with tqdm(unit_scale=True, file=RawStream(sys.stderr), **options) as bar:

        def move(done: int, total: int | None = None) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield move
