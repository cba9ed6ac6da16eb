"""A row becomes what its handler encodes: the turns of the prompt, and the responses to it."""

from __future__ import annotations

from typing import Any, NamedTuple

from mindspeed_rlxf.data.conversation import UnusableRow, conversation_of, messages_of
from mindspeed_rlxf.data.files import Row, describe_keys, look_up, unicode_problem
from mindspeed_rlxf.data.handlers import Handler, Output
from mindspeed_rlxf.data.preprocessing.map_keys import Keys, MapKeys, ShareGptKeys
from mindspeed_rlxf.data.preprocessing.sharegpt import sharegpt_turn, sharegpt_turns
from mindspeed_rlxf.data.templates import Turn


class Example(NamedTuple):
    """turns:     of the prompt, the last one the user's
    responses: none, one, or the better and the worse
    """

    turns: list[Turn]
    responses: tuple[str, ...] = ()


def example_of(row: Row, keys: Keys, handler: Handler) -> Example:
    """Raises UnusableRow."""
    if isinstance(keys, MapKeys):
        example = _alpaca(row, keys, handler)
    else:
        example = _sharegpt(row, keys, handler)
    for response in example.responses:
        if found := unicode_problem(response):
            raise UnusableRow("invalid unicode", found.rule, found.remedy)
    if handler.output is Output.ANSWERED and example.responses and not example.responses[0].strip():
        raise UnusableRow(
            "empty response",
            "an answer must hold more than white space, this one does not",
            "complete or remove the row",
        )
    return example


def _alpaca(row: Row, keys: MapKeys, handler: Handler) -> Example:
    turns = conversation_of(row, keys)
    if handler.output is Output.PROMPT:
        return Example(turns)
    if handler.output is Output.PAIR:
        pair = (_response(row, keys.chosen, turns), _response(row, keys.rejected, turns))
        return Example(turns, pair)
    if keys.response is None:
        return Example(turns)
    return Example(turns, (_response(row, keys.response, turns),))


def _response(row: Row, column: str | None, turns: list[Turn]) -> str:
    """Text, a list of one text, or a list of chat messages that ends with the assistant's."""
    value = _present(row, column)
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # an answer that was written as a number
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    *before, last = messages_of(value, "response", last="assistant")
    if before and before != turns:
        problem = "messages of a response must begin with those of the prompt, or be one"
        raise UnusableRow(
            "another prompt",
            f"{problem}, {column!r} begins otherwise",
            'name the column of the prompt, and its system and history, or "" for none',
        )
    return last.text


def _sharegpt(row: Row, keys: ShareGptKeys, handler: Handler) -> Example:
    turns = sharegpt_turns(row, keys)
    is_pair = handler.output is Output.PAIR
    expected = "user" if is_pair else "assistant"
    if turns[-1].role != expected:
        problem = f"the last message must be of the {expected}, it is of the {turns[-1].role}"
        raise UnusableRow("wrong roles", problem, "complete or remove the row")
    if not is_pair:
        return Example(turns[:-1], (turns[-1].text,))
    pair = (_judged(row, keys.chosen, keys), _judged(row, keys.rejected, keys))
    return Example(turns, pair)


def _judged(row: Row, column: str | None, keys: ShareGptKeys) -> str:
    value = _present(row, column)
    if isinstance(value, str):
        return value
    turn = sharegpt_turn(value, keys.tags, f"{column!r}")
    if turn.role != "assistant":
        problem = f"{column!r} must be a message of the assistant, this one is of the {turn.role}"
        raise UnusableRow("wrong roles", problem, "mend the row")
    return turn.text


def _present(row: Row, column: str | None) -> Any:
    assert column is not None, "checked with the map keys"
    value = look_up(row, column)
    if value is None:
        found = "here it is null" if column in row else f"this one has {describe_keys(row)}"
        problem = f"a row must have the response {column!r}, {found}"
        raise UnusableRow(
            "no response", problem, "name its column in --map-keys, or complete the row"
        )
    return value
