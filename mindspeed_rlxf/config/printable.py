"""Escape control characters in text before it is printed to a terminal."""

from __future__ import annotations

import re

# Line feeds and tabs stay; line separators and direction overrides are controls too.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return the text with control characters and direction overrides written like `\\u001b`."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
