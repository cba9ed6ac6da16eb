"""Convert rows to conversation turns and the answer.

Alpaca rows have separate columns for instruction, input, output and so on. Sharegpt rows have one
column with a message list; `Tags` names its keys and roles.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mindspeed_rlxf.config.problems import shorten_value
from mindspeed_rlxf.data.files import (
    Row,
    UnusableRow,
    describe_absence,
    look_up,
    number_text,
    unicode_problem,
)
from mindspeed_rlxf.data.handlers import Handler, Keys, MapKeys, Tags
from mindspeed_rlxf.data.templates import Turn
from mindspeed_rlxf.data.text_rows import (
    WITHOUT_ANSWER,
    last_message_rule,
    media_problem,
    read_messages,
)

CHAT_TAGS = Tags(
    role_tag="role",
    content_tag="content",
    user_tag="user",
    assistant_tag="assistant",
    observation_tag="",
    function_tag="",
)
"""Names in chat messages of alpaca rows, which have no roles for tools."""


class Example(NamedTuple):
    """A prompt's turns, and the answer if the handler writes it."""

    turns: list[Turn]
    answer: str | None = None


def make_example(row: Row, keys: Keys, handler: Handler) -> Example:
    """Make a row's prompt, and the answer if the handler writes it.

    Raises UnusableRow for a missing or mistyped column, an empty prompt or answer, turns in a wrong
    order and invalid Unicode.
    """
    problem = media_problem(row)
    if problem is not None:
        raise UnusableRow("images", problem.rule, "remove the row or the column")
    if isinstance(keys, MapKeys):
        turns = _read_prompt(row, keys)
    else:
        messages = read_messages(_require(row, keys.messages, "messages"))
        turns = _read_messages(messages, keys.tags, "messages must be")
    turns = _add_system(turns, _read_text(row, keys.system, "system"), keys.system)
    answer: Any = None
    if not isinstance(keys, MapKeys):
        if any(turn.role == "user" and not turn.text.strip() for turn in turns):
            raise _empty_text_error("prompt", "a prompt")
        _check_last(turns, "assistant", "complete or remove the row")
        answer = turns.pop().text
    elif handler.writes_answers and keys.response:
        answer = _require(row, keys.response, "response")
        if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
            rule = f"an answer must be text or a number, this one is {shorten_value(answer)}"
            raise UnusableRow("wrong type", rule, "write it as text")
        answer = number_text(answer)
    texts = [turn.text for turn in turns]
    for text in (*texts, answer or ""):
        problem = unicode_problem(text)
        if problem is not None:
            raise UnusableRow("invalid unicode", problem.rule, problem.remedy)
    if answer is not None and not answer.strip():
        raise _empty_text_error("response", "an answer")
    return Example(turns, answer)


def _read_prompt(row: Row, keys: MapKeys) -> list[Turn]:
    """Return the turns in history and prompt, with the query on a new line in the last turn."""
    turns: list[Turn] = []
    pairs = (look_up(row, keys.history) if keys.history else None) or []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            rule = "a history must be a list of [user, assistant] pairs of text, "
            rule += f"it has {shorten_value(pair)}"
            raise UnusableRow("wrong type", rule, "write [[..., ...]]")
        turns += (Turn("user", pair[0]), Turn("assistant", pair[1]))
    prompt = read_messages(_require(row, keys.prompt, "prompt"))
    query = _read_text(row, keys.query, "query")
    messages = [Turn("user", prompt)]
    if not isinstance(prompt, str):
        messages = _read_messages(prompt, CHAT_TAGS, "a prompt must be text or")
        _check_last(messages, "user", WITHOUT_ANSWER)
    text = messages[-1].text
    if query:
        text = f"{text}\n{query}" if text else query
    if not text.strip():
        raise _empty_text_error("prompt", "a prompt")
    return [*turns, *messages[:-1], Turn("user", text)]


def _require(row: Row, column: str, purpose: str) -> Any:
    value = look_up(row, column)
    if value is None:
        raise UnusableRow(
            f"no {purpose}",
            f"a row must have the {purpose} {column!r}, {describe_absence(row, column)}",
            f"name the column of the {purpose} in --map-keys, or complete the row",
        )
    return value


def _read_text(row: Row, column: str | None, purpose: str) -> str:
    value = look_up(row, column) if column else None
    if value is None or isinstance(value, str):
        return value or ""
    raise UnusableRow("wrong type", f"a {purpose} must be text", f"repair {shorten_value(value)}")


def _read_messages(value: Any, tags: Tags, rule: str) -> list[Turn]:
    if not isinstance(value, list) or not value:
        rule = f"{rule} a list of messages that is not empty, here it is {shorten_value(value)}"
        raise UnusableRow("wrong type", rule, "write it as such a list")
    turns = []
    for number, message in enumerate(value, 1):
        turns.append(_read_message(message, tags, f"message {number}"))
    if any(turn.role == "system" for turn in turns[1:]):
        raise UnusableRow("wrong roles", "only the first message may be of the system", "repair it")
    return turns


def _read_message(message: Any, tags: Tags, name: str) -> Turn:
    fields = message if isinstance(message, dict) else {}
    role = fields.get(tags.role_tag)
    text = fields.get(tags.content_tag)
    if not isinstance(role, str) or not isinstance(text, str):
        rule = f"a message must be {{{tags.role_tag!r}: role, {tags.content_tag!r}: text}}"
        remedy = "repair it, write it as text, or name its keys as tags of --map-keys"
        raise UnusableRow("wrong type", f"{rule}, {name} is {shorten_value(message)}", remedy)
    if role and role in (tags.observation_tag, tags.function_tag):
        rule = f"calls of tools are not rendered, {name} is of {role!r}"
        raise UnusableRow("tool turns", rule, "remove the row")
    roles = {tags.user_tag: "user", tags.assistant_tag: "assistant", tags.system_tag: "system"}
    if role not in roles:
        rule = f"a role must be one of {', '.join(roles)}, {name} is of {role!r}"
        raise UnusableRow("wrong roles", rule, "correct the row, or the tags of --map-keys")
    return Turn(roles[role], text)


def _add_system(turns: Sequence[Turn], system: str, column: str | None) -> list[Turn]:
    """Put the system text first, and check that user and assistant alternate after it."""
    system_turns = [turn for turn in turns if turn.role == "system"]
    dialogue = [turn for turn in turns if turn.role != "system"]
    if system_turns and system:
        rule = f"a row must have one system text, its messages and {column!r} both have one"
        raise UnusableRow("two system texts", rule, "keep one")
    if system:
        system_turns = [Turn("system", system)]
    roles = [turn.role for turn in dialogue]
    are_users = all(role == "user" for role in roles[::2])
    are_assistants = all(role == "assistant" for role in roles[1::2])
    if not (are_users and are_assistants):
        rule = f"user and assistant must take turns, they are {', '.join(roles)}"
        raise UnusableRow("wrong roles", rule, "repair the row")
    return [*system_turns, *dialogue]


def _check_last(turns: Sequence[Turn], role: str, remedy: str) -> None:
    if turns[-1].role != role:
        rule = last_message_rule(turns[-1].role, role)
        raise UnusableRow("wrong roles", rule, remedy)


def _empty_text_error(column: str, name: str) -> UnusableRow:
    rule = f"{name} must hold more than white space, this one does not"
    return UnusableRow(f"empty {column}", rule, "complete or remove the row")
