"""A row becomes the turns of a conversation: which columns hold what, and what cannot be used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.suggest import closest
from mindspeed_rlxf.data.files import (
    Row,
    describe_keys,
    look_up,
    shown,
    unicode_problem,
)
from mindspeed_rlxf.data.templates import Turn

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class MapKeys:
    """Names of columns (dots reach inside); None = unused.

    prompt:   text, or a list of chat messages {role, content}
    query:    text put on a new line under the prompt
    response: never part of the prompt; the column is kept like any other
    history:  list of [user, assistant] pairs before the prompt
    system:   text
    """

    prompt: str = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = None
    system: str | None = None

    @property
    def consumed(self) -> set[str]:
        """The columns that the prompt is made of."""
        used = (self.prompt, self.query, self.history, self.system)
        return {column for column in used if column}


class UnusableRow(ValueError):
    """A row that makes no prompt; `reason` is what counts of dropped rows call it."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


def parse_map_keys(text: str) -> MapKeys:
    """`--map-keys` as JSON: {"prompt": "question", "query": ""}; "" = unused.

    Keys that are not given keep their defaults. Raises UserError.
    """
    rule = '--map-keys must be a JSON object such as {"prompt": "question", "query": ""}'
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{rule}, {text!r} is not ({error}); put it in single quotes") from error
    if not isinstance(given, dict):
        raise UserError(f"{rule}, {text!r} is not; write {{...}}")
    known = MapKeys.__dataclass_fields__
    problems = []
    for key, column in given.items():
        if key not in known:
            guess = closest(key, known) or "remove it"
            remedy = f"did you mean {guess}?" if guess in known else guess
            problems.append(f"--map-keys: {key!r} must be one of {', '.join(known)}; {remedy}")
        elif column is not None and not isinstance(column, str):
            problems.append(f"--map-keys: {key}={column!r} must name a column; write it as text")
    if not given.get("prompt", True):
        problems.append("--map-keys: prompt must name a column, it is empty; name the prompts'")
    if problems:
        raise UserError(problems)
    columns: dict[str, Any] = {key: column or None for key, column in given.items()}
    # A default column that another key names is that key's: it must not enter the prompt twice.
    for key in known:
        if key not in columns and getattr(MapKeys(), key) in columns.values():
            columns[key] = None
    used = [columns[k] for k in ("prompt", "query", "history", "system") if columns.get(k)]
    twice = [column for column in used if used.count(column) > 1]
    if twice:
        raise UserError(
            "--map-keys: prompt, query, history and system must be different columns, "
            f"{twice[0]!r} is named twice; keep one"
        )
    return MapKeys(**columns)


def conversation_of(row: Row, keys: MapKeys) -> list[Turn]:
    """The turns of a row, the last one the user's; raises UnusableRow."""
    turns = [*_history(row, keys), *_prompt_turns(row, keys)]
    system = _text(row, keys.system, "system")
    own = [turn for turn in turns if turn.role == "system"]
    turns = [turn for turn in turns if turn.role != "system"]
    if own and system:
        problem = f"a row must have one system text, its messages and {keys.system!r} both have one"
        raise UnusableRow("two system texts", f"{problem}; keep one")
    if own or system:
        turns = [own[0] if own else Turn("system", system), *turns]
    for turn in turns:
        if problem := unicode_problem(turn.text):
            raise UnusableRow("invalid unicode", problem)
    return turns


def _prompt_turns(row: Row, keys: MapKeys) -> list[Turn]:
    prompt, query = look_up(row, keys.prompt), _text(row, keys.query, "query")
    if prompt is None:
        raise UnusableRow(
            "no prompt",
            f"a row must have a {keys.prompt!r}, {_what_it_has(row, keys.prompt)}; "
            "name the column of the prompt in --map-keys, or complete the row",
        )
    turns = [Turn("user", prompt)] if isinstance(prompt, str) else list(_messages(prompt))
    text = "\n".join(part for part in (turns[-1].text, query) if part)
    if not text.strip():
        rule = "a prompt must hold more than white space, this one does not"
        raise UnusableRow("empty prompt", f"{rule}; complete or remove the row")
    return [*turns[:-1], Turn("user", text)]


def _what_it_has(row: Row, column: str) -> str:
    return "here it is null" if column in row else f"this one has {describe_keys(row)}"


def _messages(prompt: Any) -> Iterator[Turn]:
    """A list of chat messages: a system message first or none, the user's last."""
    rule = "a prompt must be text or a list of chat messages {role, content}"
    if not isinstance(prompt, list) or not prompt:
        raise UnusableRow("wrong type", f"{rule}, this one is {shown(prompt)}; write it as text")
    for place, message in enumerate(prompt):
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, dict) else (0, 0)
        )
        if not isinstance(role, str) or not isinstance(content, str):
            found = f"message {place + 1} is {shown(message)}"
            raise UnusableRow("wrong type", f"{rule}, {found}; write it as text")
        if role not in ROLES or (role == "system" and place):
            problem = f"roles must be user and assistant after one system, message {place + 1}"
            raise UnusableRow("wrong roles", f"{problem} is of {role!r}; mend the row")
        yield Turn(role, content)
    if prompt[-1]["role"] != "user":
        problem = f"the last message must be the user's, this one is of {prompt[-1]['role']!r}"
        raise UnusableRow("wrong roles", f"{problem}; take the answer out of the prompt")


def _history(row: Row, keys: MapKeys) -> Iterator[Turn]:
    pairs = look_up(row, keys.history) if keys.history else None
    rule = "a history must be a list of [user, assistant] pairs of text"
    if pairs is not None and not isinstance(pairs, list):
        raise UnusableRow("wrong type", f"{rule}, this one is {shown(pairs)}; write [[..., ...]]")
    for pair in pairs or ():
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise UnusableRow("wrong type", f"{rule}, it has {shown(pair)}; mend the row")
        yield from (Turn("user", pair[0]), Turn("assistant", pair[1]))


def _text(row: Row, column: str | None, name: str) -> str:
    value = look_up(row, column) if column else None
    if value is None or isinstance(value, str):
        return value or ""
    problem = f"a {name} must be text, this one is {shown(value)}; write it as text"
    raise UnusableRow("wrong type", problem)
