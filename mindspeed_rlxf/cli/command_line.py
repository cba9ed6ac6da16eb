"""What the commands share: mistakes on the command line as `error:` lines, text as UTF-8."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from typing import NoReturn

from mindspeed_rlxf.config.errors import UserError


class Parser(argparse.ArgumentParser):
    """Reports a bad command line like any other mistake of the user."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def print_problems(problems: Sequence[str]) -> None:
    for problem in problems:
        print("error: " + " ".join(problem.split()), file=sys.stderr)


def speak_utf8() -> None:
    """Paths and prompts may hold any letter, whatever the locale."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
