"""Quote words of a command line for hydra. Imports nothing heavy."""

from __future__ import annotations

import re


def quote(text: str) -> str:
    """Quote a text so that hydra reads it unchanged in `key=value`.

    For hydra a backslash is an escape only before a quote, and the closing quote is one.
    """
    return "'" + re.sub(r"(\\*)('|\Z)", _escaped, text) + "'"


def _escaped(match: re.Match[str]) -> str:
    backslashes, quote = match.groups()
    return backslashes * 2 + ("\\'" if quote else "")
