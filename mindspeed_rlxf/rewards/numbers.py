"""Find the number that a text gives as its answer."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 4000  # characters of a number; longer ones are ignored
ANSWER_MARK = "####"

# A sign (not the operator of "20-5"), a dollar sign; then a LaTeX fraction, or digits with or
# without thousands separators and decimals.
_NUMBER = re.compile(
    r"(?P<minus>(?<![\w)])[-\u2212])?\$?"
    r"(?:\\[dt]?frac\{(?P<top>[0-9]+)\}\{(?P<bottom>[0-9]+)\}"
    r"|(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+))"
)
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|\\!,|\\ )(?=[0-9]{3}(?![0-9]))")


def marked_number(text: str) -> Fraction | None:
    """Return the first number after the first `####` of a text, None without one."""
    numbers = find_numbers(text.partition(ANSWER_MARK)[2])
    return numbers[0] if numbers else None


def boxed_number(text: str) -> Fraction | None:
    """Return the last number in the last `\\boxed{...}`; None without a number or a box."""
    numbers = find_numbers(find_boxed(text) or "")
    return numbers[-1] if numbers else None


def last_number(text: str) -> Fraction | None:
    numbers = find_numbers(text)
    return numbers[-1] if numbers else None


def final_number(text: str) -> Fraction | None:
    """Return the first number after `####`, else the last in the last box, else the last of all.

    None without a number.
    """
    for find in (marked_number, boxed_number, last_number):
        if (number := find(text)) is not None:
            return number
    return None


def find_numbers(text: str) -> list[Fraction]:
    """List all numbers in a text, in order, as exact fractions."""
    text = _THOUSANDS.sub(",", text).replace("\\$", "$")
    values = []
    for match in _NUMBER.finditer(text):
        if len(match[0]) <= MAX_DIGITS and (match["digits"] or int(match["bottom"])):
            digits = match["digits"] or f"{match['top']}/{match['bottom']}"
            value = Fraction(digits.replace(",", ""))
            values.append(-value if match["minus"] else value)
    return values


def find_boxed(text: str) -> str | None:
    """Return what the last \\boxed{...} contains; None without one or if it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None
