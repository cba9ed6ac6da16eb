"""The nearest good value to a bad one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, words: Iterable[str]) -> str | None:
    """The known word most like a misspelt one; None when none is near."""
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return matches[0] if matches else None


def around(value: int, good: Iterable[int]) -> list[int]:
    """The good numbers next below and next above `value`; either may be absent."""
    below = [number for number in good if 0 < number < value]
    above = [number for number in good if number > value]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def multiples_around(value: int, step: int) -> list[int]:
    """The positive multiples of `step` next below and next above `value`."""
    lower = value // step * step
    return [number for number in (lower, lower + step) if number > 0]


def divisors(number: int) -> list[int]:
    """All divisors of a positive number."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def use(numbers: Iterable[int]) -> str:
    """The remedy: `use 96 or 104`."""
    return "use " + " or ".join(map(str, numbers))
