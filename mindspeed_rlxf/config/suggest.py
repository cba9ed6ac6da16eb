"""Find the nearest legal value to a wrong one, and format values, for messages and overrides."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from math import isfinite, isqrt
from typing import Any

MAX_WORD = 200  # characters of a word that is compared with others
MAX_FACTORED = 10**12
MAX_SHOWN = 60  # characters of a value


def closest(word: str, words: Iterable[str]) -> str | None:
    """Return the one of `words` that is most like `word`; else the shortest that begins with it.

    Only a word of more than two characters is taken as such a beginning. None when nothing fits, or
    `word` is longer than MAX_WORD.
    """
    if len(word) > MAX_WORD:
        return None  # the time to compare grows with the square of the length
    known = sorted(words, key=lambda name: (len(name), name))
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    longer = [name for name in known if len(word) > 2 and name.startswith(word)]
    return next(iter(matches + longer), None)


def neighbours(value: int, good: Iterable[int]) -> list[int]:
    """Return the nearest positive number of `good` below `value`, then the nearest above.

    Either may be missing. `value` itself is never returned.
    """
    below = [number for number in good if 0 < number < value]
    above = [number for number in good if number > value]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def multiples_around(value: int, step: int) -> list[int]:
    """Return the nearest multiples of `step`, ascending: one at or below `value`, one above.

    Only the one above where the other would be 0.
    """
    lower = value // step * step
    return [number for number in (lower, lower + step) if number > 0]


def divisors(number: int) -> list[int]:
    """List the divisors of a positive number, ascending; above MAX_FACTORED only 1 and itself."""
    if number > MAX_FACTORED:
        return [1, number]
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def use(numbers: Iterable[int]) -> str:
    """Return a remedy such as `use 96 or 104`."""
    return "use " + " or ".join(map(str, numbers))


def format_value(value: Any) -> str:
    """Return `repr(value)`, but YAML's words for None, bools, inf and NaN (null, true, .inf, .nan).

    Only for the value itself, not inside lists and dicts.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not isfinite(value):
        return f"{value}".replace("inf", ".inf").replace("nan", ".nan")
    return repr(value)


def shorten_value(value: Any) -> str:
    """Return `format_value` of a value; if above MAX_SHOWN characters, cut to that with "..."."""
    text = format_value(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def quote(text: str) -> str:
    """Return the text in single quotes, so that hydra reads it unchanged in `key=value`.

    Hydra takes a backslash as an escape only before a quote, also before the closing one.
    """
    doubled = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{doubled}'"
