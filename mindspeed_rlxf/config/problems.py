"""Mistakes of the user, in parts: key, rule, value, remedy; and the nearest legal values."""

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
    """Return the one of `words` that is most like `word`; else the shortest that begins with it.

    Only a word of more than two characters is taken as such a beginning. None when nothing fits.
    """
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
    """List the divisors of a positive number, ascending."""
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


# Line feeds and tabs stay; line separators and direction overrides are controls too.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
REF = "\0"
"""Marks the start and end of a key inside a text, see `ref`. No path or flag can contain it."""


def printable(text: str) -> str:
    """Return the text with control characters and direction overrides written like `\\u001b`."""
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def ref(key: object) -> str:
    """Return the key between REF marks, for texts of problems: `Problem` finds and renames it."""
    return f"{REF}{key}{REF}"


@dataclass(frozen=True)
class Problem:
    """One mistake of the user; `str` gives the line for people: `key=value rule; remedy`.

    key:    a key of the configuration, a flag, a file or `file:row`; "" where there is no name
    rule:   the condition, as the clause after `key=value`; other keys in it by `ref`
    value:  the given value; None is not shown; text is shown without quotes
    remedy: how to correct it, other keys in it by `ref`; "" where there is none
    colon:  the rule is a sentence of its own, printed after a colon
    """

    key: str
    rule: str
    value: object = None
    remedy: str = ""
    colon: bool = False

    def rename_keys(self, spell: Callable[[str], str]) -> Problem:
        """Return a copy with every key, those marked in texts too, replaced by `spell(key)`."""

        def rename(text: str) -> str:
            return re.sub(f"{REF}(.*?){REF}", lambda found: ref(spell(found[1])), text)

        key, rule, remedy = spell(self.key), rename(self.rule), rename(self.remedy)
        return replace(self, key=key, rule=rule, remedy=remedy)

    def __str__(self) -> str:
        value = getattr(self.value, "value", self.value)
        shown = str(value) if isinstance(value, (str, PathLike)) else format_value(value)
        head = self.key if self.value is None else f"{self.key}={shown}"
        head += (":" if self.colon else "") + (" " if head else "")
        text = f"{head}{self.rule}; {self.remedy}" if self.remedy else f"{head}{self.rule}"
        return printable(" ".join(text.replace(REF, "").split()))


def at_most(key: str, value: float, what: str, limit: float) -> Iterator[Problem]:
    """Yield a problem if a key's value is above `limit`, which `what` names."""
    if value > limit:  # .15g shows integers in full
        remedy = f"use {limit:.15g} or less"
        yield Problem(key, f"must be at most {what}", f"{value:.15g}", remedy)


def at_least(key: str, value: int, what: str, limit: int) -> Iterator[Problem]:
    """Yield a problem if a key's value is below `limit`, which `what` names."""
    if value < limit:
        yield Problem(key, f"must be at least {what}", value, f"use {limit} or more")


def divides(key: str, value: int, what: str, total: int) -> Iterator[Problem]:
    """Yield a problem if a key's value does not divide `total`, which `what` names."""
    if total % value:
        yield Problem(key, f"must divide {what}", value, use(neighbours(value, divisors(total))))


class UserError(ValueError):
    """Mistakes that the user can correct, at least one; as text one line per problem.

    The command prints one `error:` line per problem and exits with 2.
    """

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        assert all(isinstance(each, Problem) for each in self.problems), "parts, and not a text"
        assert self.problems, "a UserError names at least one problem"
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[UserError], tuple[list[Problem]]]:
        return type(self), (self.problems,)


class ConfigError(UserError):
    """The configuration does not describe a run that can start."""


def explain(path: str, errors: Sequence[ErrorDetails], meaning: str = "") -> Problem:
    """Return one problem for all pydantic errors of a key; a union type has several.

    Args:
        meaning: description of the key, the fix unless a similar legal value is found.
    """
    first = errors[0]
    if first["type"] == "missing":
        return Problem(
            path, "is required", remedy=f"add it to the YAML or give {path}=... on the command line"
        )
    rules = dict.fromkeys(error["msg"].replace("Input should", "must") for error in errors)
    expected = first.get("ctx", {}).get("expected", "").replace("'", "")
    words = expected.replace(" or ", ", ").split(", ")
    guess = closest(str(first["input"]).lower(), words) if len(errors) == 1 else None
    remedy = f"meaning: {meaning}" if meaning else "correct it"
    remedy = f"did you mean {guess}?" if guess else remedy
    return Problem(path, " or ".join(rules), format_value(first["input"]), remedy)
