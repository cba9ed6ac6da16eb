"""Mistakes of the user, in parts: key, rule, value, remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike

from mindspeed_rlxf.config.printable import printable
from mindspeed_rlxf.config.suggest import format_value

MAX_LINE = 8000  # characters of a problem as text; a longer one is cut
REF = "\0"
"""Marks the start and end of a key inside a text, see `ref`. No path or flag can contain it."""


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
        return replace(
            self,
            key=spell(self.key),
            rule=_rename(self.rule, spell),
            remedy=_rename(self.remedy, spell),
        )

    def __str__(self) -> str:
        value = getattr(self.value, "value", self.value)
        shown = str(value) if isinstance(value, (str, PathLike)) else format_value(value)
        head = self.key if self.value is None else f"{self.key}={shown}"
        head += (":" if self.colon else "") + (" " if head else "")
        text = f"{head}{self.rule}; {self.remedy}" if self.remedy else f"{head}{self.rule}"
        line = " ".join(text.replace(REF, "").split())
        return printable(line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 3]}...")


def _rename(text: str, spell: Callable[[str], str]) -> str:
    parts = text.split(REF)
    return "".join(ref(spell(part)) if place % 2 else part for place, part in enumerate(parts))


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
