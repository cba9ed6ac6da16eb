"""Words of a command line that are to be taken as they are. Imports nothing heavy."""

from __future__ import annotations

import re


def quoted(text: str) -> str:
    """The text as hydra reads it in `key=value`, whatever characters are in it.

    A backslash is an escape before a quote only, which the end of the text is followed by.
    """
    return "'" + re.sub(r"(\\*)('|\Z)", _escaped, text) + "'"


def _escaped(match: re.Match[str]) -> str:
    backslashes, quote = match.groups()
    return backslashes * 2 + ("\\'" if quote else "")
