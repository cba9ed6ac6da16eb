"""Parse `--map-keys`, which names the columns with prompt, response and so on of a row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.suggest import closest
from mindspeed_rlxf.data.files import describe_keys
from mindspeed_rlxf.data.handlers import DEFAULT_HANDLER, Handler, Output, RowStyle

FLAG = "--map-keys"
NOT_RENDERED = {
    "tools": "descriptions of tools are not rendered; write them into the system text",
    "kto_tag": "single judged responses are not preprocessed; make pairs of them",
}


@dataclass(frozen=True)
class MapKeys:
    """Names of the columns of alpaca rows; None = unused. "a.b" is field b of the object a.

    prompt:   text, or a list of chat messages {role, content}
    query:    text put on a new line under the prompt
    response: text; not read by handlers that write prompts only
    history:  list of [user, assistant] pairs before the prompt
    system:   text
    chosen, rejected: the better and the worse response of a pair
    """

    prompt: str = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = None
    system: str | None = None
    chosen: str | None = "chosen"
    rejected: str | None = "rejected"

    @property
    def consumed(self) -> set[str]:
        """Columns that become the prompt, and are therefore not written as columns."""
        return {c for c in (self.prompt, self.query, self.history, self.system) if c}


@dataclass(frozen=True)
class Tags:
    """Names of keys and roles in sharegpt messages."""

    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"


@dataclass(frozen=True)
class ShareGptKeys:
    """Names of the columns of sharegpt rows; None = unused.

    messages: list of messages, whose keys and roles `tags` names
    system:   text, where no message is the system's
    chosen, rejected: the better and the worse response of a pair, one message each
    """

    messages: str = "conversations"
    system: str | None = None
    chosen: str | None = "chosen"
    rejected: str | None = "rejected"
    tags: Tags = field(default_factory=Tags)

    @property
    def consumed(self) -> set[str]:
        return {c for c in (self.messages, self.system) if c}


Keys = MapKeys | ShareGptKeys


def default_keys(handler: Handler) -> Keys:
    return MapKeys() if handler.style is RowStyle.ALPACA else ShareGptKeys()


def known_keys(handler: Handler) -> list[str]:
    """List the keys of --map-keys that a handler accepts.

    Handlers of pairs accept chosen and rejected but no response, others the reverse.
    """
    unused = ("response",) if handler.output is Output.PAIR else ("chosen", "rejected")
    return [key.name for key in fields(default_keys(handler)) if key.name not in unused]


def parse_map_keys(text: str, handler: Handler) -> Keys:
    """Parse JSON such as {"prompt": "question", "query": ""}; "" = unused.

    Keys that are not given keep their defaults, or become unused where another key names their
    default column. Raises UserError for invalid JSON, invalid keys, conflicting columns, and a
    prompt or response without a column that the handler needs.
    """
    defaults, first, example = (
        default_keys(handler),
        "prompt",
        '{"prompt": "question", "query": ""}',
    )
    if isinstance(defaults, ShareGptKeys):
        first, example = "messages", '{"messages": "conversations", "tags": {"user_tag": "user"}}'
    try:
        given = json.loads(text)
    except ValueError as error:
        rule = f"must be a JSON object such as {example}, {text!r} is not ({error})"
        raise UserError(Problem(FLAG, rule, remedy="put it in single quotes")) from error
    if not isinstance(given, dict):
        rule = f"must be a JSON object such as {example}, {text!r} is not"
        raise UserError(Problem(FLAG, rule, remedy="write {...}"))
    problems = [p for key, value in given.items() for p in _key_problems(key, value, handler)]
    if not given.get(first, True):
        problems.append(_flag_problem(f"{first} must name a column, it is empty", "name it"))
    if problems:
        raise UserError(problems)
    columns: dict[str, Any] = {
        k: column or None for k, column in given.items() if hasattr(defaults, k)
    }
    if "tags" in columns:
        columns["tags"] = Tags(**(columns["tags"] or {}))
    # A default column that another key names belongs to that key, as it must be used only once.
    for key, default in asdict(defaults).items():
        if key not in columns and default in columns.values():
            columns[key] = None
    keys = type(defaults)(**columns)
    problems = list(_column_problems(keys, handler))
    if getattr(keys, first) is None:
        rule = f"{first} must have a column, another key names its default"
        problems.append(_flag_problem(rule, f"name the column of {first} too"))
    if problems:
        raise UserError(problems)
    return keys


def missing_columns(
    keys: Keys, handler: Handler, columns: dict[str, None], extra: Iterable[str] = ()
) -> Iterator[Problem]:
    """Yield a problem for each column that the user named and that no row has.

    columns: names of all columns of the rows. extra: columns of --dataset-additional-keys.
    Columns equal to the default may be absent, and so may the response of a handler that writes
    prompts only. Of "a.b", only "a" is looked for.
    """
    defaults = asdict(default_keys(handler))
    asked = {k: v for k, v in asdict(keys).items() if isinstance(v, str) and v != defaults[k]}
    if handler.output is Output.PROMPT:
        asked.pop("response", None)
    named = [(f"{FLAG}: {key} must name a column", column) for key, column in asked.items()]
    named += [("--dataset-additional-keys must name columns", column) for column in extra]
    for rule, column in named:
        if column not in columns and column.split(".")[0] not in columns:
            guess = closest(column, columns)
            found = f"no row has {column!r} (there are {describe_keys(columns)})"
            remedy = f"did you mean {guess}?" if guess else 'name one, or "" for none'
            yield Problem("", f"{rule}, {found}", remedy=remedy)


def _flag_problem(rule: str, remedy: str) -> Problem:
    return Problem(FLAG, rule, remedy=remedy, colon=True)


def _key_problems(key: str, value: Any, handler: Handler) -> Iterator[Problem]:
    """Yield the problems of one key of --map-keys and its value.

    Keys that only other handlers use, and those of NOT_RENDERED, are valid if they are empty.
    """
    known = known_keys(handler)
    if key == "tags" and key in known:
        tags = value or {}
        if not isinstance(tags, dict):
            yield _flag_problem(f"tags={tags!r} must be an object", 'write {"user_tag": "user"}')
            return
        for tag, word in tags.items():
            if tag not in Tags.__dataclass_fields__:
                yield _unknown_key_problem(f"tag {tag!r}", tag, Tags.__dataclass_fields__)
            elif not isinstance(word, str) or not word:
                yield _flag_problem(f"tag {tag}={word!r} must be a word", "write it as text")
    elif key in known:
        if value is not None and not isinstance(value, str):
            yield _flag_problem(f"{key}={value!r} must name a column", "write it as text")
    elif key in NOT_RENDERED:
        if value:
            yield _flag_problem(f"{key!r} has no use here: {NOT_RENDERED[key]}", "")
    elif value or key not in MapKeys.__dataclass_fields__:
        yield _unknown_key_problem(repr(key), key, known)


def _unknown_key_problem(name: str, key: str, known: Iterable[str]) -> Problem:
    guess = closest(key, known)
    remedy = f"did you mean {guess}?" if guess else "remove it"
    return _flag_problem(f"{name} must be one of {', '.join(known)}", remedy)


def _column_problems(keys: Keys, handler: Handler) -> Iterator[Problem]:
    """Yield a problem for a column that is named twice, and for each response that has none."""
    needed = {Output.PAIR: ("chosen", "rejected"), Output.INSTRUCTION: ("response",)}
    for key in needed.get(handler.output, ()):
        if getattr(keys, key, "messages") is None:
            yield _flag_problem(
                f"{key} must name a column for {handler.name}, it is empty",
                f"name it, or make prompts alone with {DEFAULT_HANDLER}",
            )
    if isinstance(keys, MapKeys):
        used = [c for c in (keys.prompt, keys.query, keys.history, keys.system) if c]
        if twice := [column for column in used if used.count(column) > 1]:
            rule = "prompt, query, history and system must be different columns"
            yield _flag_problem(f"{rule}, {twice[0]!r} is named twice", "keep one")
        answered = handler.output in (Output.ANSWERED, Output.INSTRUCTION)
        if answered and keys.response == keys.prompt:
            rule = f"response and prompt must be different columns for {handler.name}"
            remedy = "name the column of the answers"
            yield _flag_problem(f"{rule}, both are {keys.prompt!r}", remedy)
