"""What the commands share: mistakes on the command line as `error:` lines, text as UTF-8."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.suggest import closest
from mindspeed_rlxf.files.printable import protect


class Parser(argparse.ArgumentParser):
    """Reports a bad command line like any other mistake of the user."""

    def error(self, message: str) -> NoReturn:
        raise UserError(Problem("", message, remedy="see --help"))


def unknown_option(word: str, flags: Sequence[str]) -> Problem:
    flag = word.split("=")[0]
    guess = closest(flag, flags) if flag.startswith("-") else None
    return Problem(
        word,
        "no such option",
        remedy=f"did you mean {guess}?" if guess else "remove it; --help lists the options",
        colon=True,
    )


def print_problems(problems: Sequence[Problem]) -> None:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)


def speak_utf8() -> None:
    """Paths and prompts may hold any letter, whatever the locale; none of them steers a terminal.

    Everything that this process prints goes through here, that of libraries and tracebacks too.
    """
    for stream in (sys.stdout, sys.stderr):
        protect(stream)
