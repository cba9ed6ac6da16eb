"""User mistakes in parts (key, rule, value, hint), and the nearest legal values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isqrt
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the supervisor imports this module, and must not need pydantic
    from pydantic_core import ErrorDetails

MAX_SHOWN = 60  # characters of a value


def closest(word: str, words: Iterable[str]) -> str | None:
    """Return the most similar word, else the shortest one starting with `word`, else None.

    Only a `word` longer than two characters counts as a start.
    """
    candidates = sorted(words, key=lambda name: (len(name), name))
    matches = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    if matches:
        return matches[0]
    if len(word) > 2:
        for candidate in candidates:
            if candidate.startswith(word):
                return candidate
    return None


def neighbours(value: int, good: Iterable[int]) -> list[int]:
    """Return the nearest positive number in `good` below `value`, then the nearest above.

    Either may be missing; `value` itself is never returned.
    """
    below = [number for number in good if 0 < number < value]
    above = [number for number in good if number > value]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def multiples_around(value: int, step: int) -> list[int]:
    """Return the multiples of `step` around `value`, ascending; the lower one only if above 0."""
    lower = value // step * step
    return [number for number in (lower, lower + step) if number > 0]


def divisors(number: int) -> list[int]:
    """List a positive number's divisors, ascending."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def use(numbers: Iterable[int]) -> str:
    """Return a hint such as `use 96 or 104`."""
    return "use " + " or ".join(map(str, numbers))


def format_value(value: Any) -> str:
    """Return `repr(value)`, but with YAML's null, true, .inf and .nan at the top level."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not isfinite(value):
        return f"{value}".replace("inf", ".inf").replace("nan", ".nan")
    return repr(value)


def shorten_value(value: Any) -> str:
    """Return `format_value(value)`, truncated to MAX_SHOWN characters."""
    text = format_value(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def quote(text: str) -> str:
    """Return the text in single quotes, so hydra reads it unchanged in `key=value`.

    Hydra treats a backslash as an escape only before a quote, including the closing one.
    """

    def escape(match: re.Match[str]) -> str:
        backslashes, quote_mark = match.groups()
        return backslashes * 2 + ("\\'" if quote_mark else "")

    return "'" + re.sub(r"(\\*)('|\Z)", escape, text) + "'"


# Line feeds and tabs stay; line separators and direction overrides are controls too.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
REF = "\0"
"""Marks a key's start and end inside a text, see `ref`. No path or flag can contain it."""


def printable(text: str) -> str:
    r"""Return the text with control characters and direction overrides escaped (\u001b)."""
    return CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def ref(key: object) -> str:
    """Return the key between REF marks, so `Problem` can find and rename it in a text."""
    return f"{REF}{key}{REF}"


@dataclass(frozen=True)
class Problem:
    """A user mistake; `str` gives one line: `key=value rule; remedy`.

    Attributes:
        key: Configuration key, flag, file or `file:row`; "" if there is no name.
        rule: The condition, as the clause after `key=value`; other keys in it by `ref`.
        value: The given value; None is not shown, text is shown without quotes.
        remedy: Hint for a fix, other keys in it by `ref`; "" for none.
        colon: Whether the rule is a sentence, printed after a colon.
    """

    key: str
    rule: str
    value: object = None
    remedy: str = ""
    colon: bool = False

    def rename_keys(self, spell: Callable[[str], str]) -> Problem:
        """Return a copy with every key, also inside texts, replaced by `spell(key)`."""

        def rename(text: str) -> str:
            return re.sub(f"{REF}(.*?){REF}", lambda match: ref(spell(match[1])), text)

        rule = rename(self.rule)
        return replace(self, key=spell(self.key), rule=rule, remedy=rename(self.remedy))

    def __str__(self) -> str:
        value = getattr(self.value, "value", self.value)  # of an enum
        text = self.key
        if isinstance(value, (str, PathLike)):
            text += f"={value}"
        elif value is not None:
            text += f"={format_value(value)}"
        if self.colon:
            text += ":"
        text += f" {self.rule}"
        if self.remedy:
            text += f"; {self.remedy}"
        return printable(" ".join(text.replace(REF, "").split()))


class MissingFile(Problem):
    """A file or folder that the run needs, and that is not there."""


def at_most(key: str, value: float, limit_name: str, limit: float) -> Iterator[Problem]:
    """Yield a problem if a key's value is above `limit`, which `limit_name` describes."""
    if value > limit:  # .15g shows integers in full
        remedy = f"use {limit:.15g} or less"
        yield Problem(key, f"must be at most {limit_name}", f"{value:.15g}", remedy)


def at_least(key: str, value: int, limit_name: str, limit: int) -> Iterator[Problem]:
    """Yield a problem if a key's value is below `limit`, which `limit_name` describes."""
    if value < limit:
        yield Problem(key, f"must be at least {limit_name}", value, f"use {limit} or more")


def divides(key: str, value: int, total_name: str, total: int) -> Iterator[Problem]:
    """Yield a problem if a key's value does not divide `total`, which `total_name` describes."""
    if total % value:
        yield Problem(
            key, f"must divide {total_name}", value, use(neighbours(value, divisors(total)))
        )


class UserError(ValueError):
    """One or more mistakes for the user to fix; as text one line per problem.

    The command prints one `error:` line per problem and exits with 2.
    """

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        are_problems = all(isinstance(problem, Problem) for problem in self.problems)
        assert are_problems, "parts, and not a text"
        assert self.problems, "a UserError names at least one problem"
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[UserError], tuple[list[Problem]]]:
        return type(self), (self.problems,)


class ConfigError(UserError):
    """The configuration describes no run that can start."""


def explain(path: str, error: ErrorDetails, meaning: str = "") -> Problem:
    """Return the problem behind a pydantic error.

    Args:
        path: The key as the user wrote it.
        error: pydantic's error.
        meaning: The key's description, shown as a hint if no legal value is similar.
    """
    if error["type"] == "missing":
        hint = f"add it to the YAML or give {path}=... on the command line"
        return Problem(path, "is required", remedy=hint)
    expected = error.get("ctx", {}).get("expected", "").replace("'", "")
    given = str(error["input"]).lower()
    guess = closest(given, expected.replace(" or ", ", ").split(", "))
    is_bool = error["type"].startswith("bool_")
    if is_bool:
        guess = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(given)
    remedy = f"meaning: {meaning}" if meaning else "correct it"
    remedy = f"did you mean {guess}?" if guess else remedy
    rule = "must be true or false" if is_bool else error["msg"].replace("Input should", "must")
    return Problem(path, rule, format_value(error["input"]), remedy)
