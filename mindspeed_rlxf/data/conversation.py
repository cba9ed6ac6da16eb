"""A row becomes the turns of a conversation, or the reason why it cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.data.files import (
    Row,
    describe_keys,
    look_up,
    shown,
    unicode_problem,
)
from mindspeed_rlxf.data.preprocessing.map_keys import MapKeys
from mindspeed_rlxf.data.templates import Turn

ROLES = ("system", "user", "assistant")


class UnusableRow(ValueError):
    """A row that makes no prompt; `reason` is what counts of dropped rows call it."""

    def __init__(self, reason: str, rule: str, remedy: str) -> None:
        self.reason, self.problem = reason, Problem("", rule, remedy=remedy)
        super().__init__(str(self.problem))


def conversation_of(row: Row, keys: MapKeys) -> list[Turn]:
    """The turns of a row, the last one the user's; raises UnusableRow."""
    turns = [*_history(row, keys), *_prompt_turns(row, keys)]
    turns = with_system(turns, text_of(row, keys.system, "system"), keys.system)
    check_turns(turns)
    return turns


def with_system(turns: Sequence[Turn], system: str, column: str | None) -> list[Turn]:
    """The turns with the one system text first: their own, or that of the column."""
    own = [turn for turn in turns if turn.role == "system"]
    others = [turn for turn in turns if turn.role != "system"]
    if own and system:
        problem = f"a row must have one system text, its messages and {column!r} both have one"
        raise UnusableRow("two system texts", problem, "keep one")
    if own or system:
        return [own[0] if own else Turn("system", system), *others]
    return others


def check_turns(turns: Sequence[Turn]) -> None:
    """After the system, user and assistant have to take turns, in text that UTF-8 can hold."""
    roles = [turn.role for turn in turns if turn.role != "system"]
    for place, role in enumerate(roles):
        expected = ROLES[1 + place % 2]
        if role != expected:
            problem = f"user and assistant must take turns, turn {place + 1} is of the {role}"
            raise UnusableRow("wrong roles", f"{problem}, not of the {expected}", "mend the row")
    for turn in turns:
        if found := unicode_problem(turn.text):
            raise UnusableRow("invalid unicode", found.rule, found.remedy)


def _prompt_turns(row: Row, keys: MapKeys) -> list[Turn]:
    prompt, query = look_up(row, keys.prompt), text_of(row, keys.query, "query")
    if prompt is None:
        raise UnusableRow(
            "no prompt",
            f"a row must have a {keys.prompt!r}, {_what_it_has(row, keys.prompt)}",
            "name the column of the prompt in --map-keys, or complete the row",
        )
    turns = [Turn("user", prompt)] if isinstance(prompt, str) else list(messages_of(prompt))
    text = "\n".join(part for part in (turns[-1].text, query) if part)
    if not text.strip():
        raise UnusableRow(
            "empty prompt",
            "a prompt must hold more than white space, this one does not",
            "complete or remove the row",
        )
    return [*turns[:-1], Turn("user", text)]


def _what_it_has(row: Row, column: str) -> str:
    return "here it is null" if column in row else f"this one has {describe_keys(row)}"


def messages_of(value: Any, name: str = "prompt", last: str = "user") -> Iterator[Turn]:
    """A list of chat messages: a system message first or none; the last one is of role `last`."""
    rule = f"a {name} must be text or a list of chat messages {{role, content}}"
    if not isinstance(value, list) or not value:
        raise UnusableRow("wrong type", f"{rule}, this one is {shown(value)}", "write it as text")
    for place, message in enumerate(value):
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, dict) else (0, 0)
        )
        if not isinstance(role, str) or not isinstance(content, str):
            found = f"message {place + 1} is {shown(message)}"
            raise UnusableRow("wrong type", f"{rule}, {found}", "write it as text")
        if role not in ROLES or (role == "system" and place):
            problem = f"roles must be user and assistant after one system, message {place + 1}"
            raise UnusableRow("wrong roles", f"{problem} is of {role!r}", "mend the row")
        yield Turn(role, content)
    if value[-1]["role"] != last:
        problem = f"the last message of a {name} must be the {last}'s, this one is of "
        raise UnusableRow(
            "wrong roles",
            f"{problem}{value[-1]['role']!r}",
            "take the answer out of it" if last == "user" else "complete the row",
        )


def _history(row: Row, keys: MapKeys) -> Iterator[Turn]:
    pairs = look_up(row, keys.history) if keys.history else None
    rule = "a history must be a list of [user, assistant] pairs of text"
    if pairs is not None and not isinstance(pairs, list):
        raise UnusableRow("wrong type", f"{rule}, this one is {shown(pairs)}", "write [[..., ...]]")
    for pair in pairs or ():
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise UnusableRow("wrong type", f"{rule}, it has {shown(pair)}", "mend the row")
        yield from (Turn("user", pair[0]), Turn("assistant", pair[1]))


def text_of(row: Row, column: str | None, name: str) -> str:
    value = look_up(row, column) if column else None
    if value is None or isinstance(value, str):
        return value or ""
    raise UnusableRow(
        "wrong type", f"a {name} must be text, this one is {shown(value)}", "write it as text"
    )
