"""Quote words of a command line for hydra. Imports nothing heavy."""

from __future__ import annotations

import re


def quote(text: str) -> str:
    """Return the text in single quotes, so that hydra reads it unchanged in `key=value`.

    Hydra takes a backslash as an escape only before a quote, also before the closing one.
    """
    return "'" + re.sub(r"(\\*)('|\Z)", _escape_match, text) + "'"


def _escape_match(match: re.Match[str]) -> str:
    backslashes, quote = match.groups()
    return backslashes * 2 + ("\\'" if quote else "")
