"""Mistakes of the user in parts, as opposed to failures of the run: key, rule, value, remedy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from os import PathLike

from mindspeed_rlxf.config.suggest import written
from mindspeed_rlxf.files.printable import printable

MAX_LINE = 8000  # characters of a line for people, whatever value it quotes
REF = "\0"
"""Stands before and after a key inside a text, see `ref`. No YAML, path or flag has it."""


def ref(key: object) -> str:
    """A key inside the text of a rule or a remedy, so that it can be found and renamed there."""
    return f"{REF}{key}{REF}"


@dataclass(frozen=True)
class Problem:
    """One mistake of the user; `str` gives the line for people: `key=value rule; remedy`.

    key:    of the configuration, a flag, a file or `file:row`; "" where nothing has a name
    rule:   what must hold, the clause after `key=value`; other keys in it by `ref`
    value:  what stands there, None = it is not shown; text is shown as it is
    remedy: what to do about it, other keys in it by `ref`; "" where nobody knows
    colon:  the rule is a sentence of its own and stands after a colon
    reads:  keys that the rule depends on and does not name
    """

    key: str
    rule: str
    value: object = None
    remedy: str = ""
    colon: bool = False
    reads: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that decides whether the rule is broken."""
        named = [part for part in (self.key, *self.reads) if part]
        return (*named, *self.rule.split(REF)[1::2])

    def judges(self, paths: Collection[str]) -> bool:
        """True where the rule depends on one of these keys, or on one inside these sections."""
        return any(key == path or key.startswith(f"{path}.") for key in self.keys for path in paths)

    def spelled(self, spell: Callable[[str], str]) -> Problem:
        """The same problem with every key as `spell` writes it."""
        return replace(
            self,
            key=spell(self.key),
            rule=_spelled(self.rule, spell),
            remedy=_spelled(self.remedy, spell),
            reads=tuple(map(spell, self.reads)),
        )

    def __str__(self) -> str:
        head = self.key if self.value is None else f"{self.key}={_shown(self.value)}"
        head += (":" if self.colon else "") + (" " if head else "")
        text = f"{head}{self.rule}; {self.remedy}" if self.remedy else f"{head}{self.rule}"
        line = " ".join(text.replace(REF, "").split())
        return printable(line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 3]}...")


def _spelled(text: str, spell: Callable[[str], str]) -> str:
    parts = text.split(REF)
    return "".join(ref(spell(part)) if place % 2 else part for place, part in enumerate(parts))


def _shown(value: object) -> str:
    word = getattr(value, "value", value)
    return str(word) if isinstance(word, (str, PathLike)) else written(word)


class UserError(ValueError):
    """Something the user can put right: every problem found, and as text a line for each.

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
    """The configuration does not say a run that can be started."""
