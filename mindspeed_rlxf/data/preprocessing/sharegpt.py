"""Sharegpt rows: one column with the list of messages, whose keys and roles `Tags` names."""

from __future__ import annotations

from typing import Any

from mindspeed_rlxf.data.conversation import UnusableRow, check_turns, text_of, with_system
from mindspeed_rlxf.data.files import Row, describe_keys, look_up, shown
from mindspeed_rlxf.data.preprocessing.map_keys import ShareGptKeys, Tags
from mindspeed_rlxf.data.templates import Turn


def sharegpt_turns(row: Row, keys: ShareGptKeys) -> list[Turn]:
    """The turns of a row, a system text first where there is one; raises UnusableRow.

    An empty prompt of the user is refused as in other rows, an empty response is kept.
    """
    messages = look_up(row, keys.messages)
    if messages is None:
        found = "here it is null" if keys.messages in row else f"this one has {describe_keys(row)}"
        problem = f"a row must have {keys.messages!r}, {found}"
        raise UnusableRow(
            "no messages",
            problem,
            "name the column of the messages in --map-keys, or complete the row",
        )
    if not isinstance(messages, list) or not messages:
        rule = "messages must be a list that is not empty"
        raise UnusableRow("wrong type", f"{rule}, this one is {shown(messages)}", "mend the row")
    turns = [
        sharegpt_turn(message, keys.tags, f"message {place + 1}")
        for place, message in enumerate(messages)
    ]
    if any(turn.role == "system" for turn in turns[1:]):
        problem = "only the first message may be the system's, a later one is too"
        raise UnusableRow("wrong roles", problem, "mend the row")
    turns = with_system(turns, text_of(row, keys.system, "system"), keys.system)
    check_turns(turns)
    if any(turn.role == "user" and not turn.text.strip() for turn in turns):
        raise UnusableRow(
            "empty prompt",
            "a prompt must hold more than white space, this one does not",
            "complete or remove the row",
        )
    return turns


def sharegpt_turn(message: Any, tags: Tags, name: str) -> Turn:
    """One message; raises UnusableRow."""
    rule = f"a message must be {{{tags.role_tag!r}: role, {tags.content_tag!r}: text}}"
    role, text = (
        (message.get(tags.role_tag), message.get(tags.content_tag))
        if isinstance(message, dict)
        else (None, None)
    )
    if not isinstance(role, str) or not isinstance(text, str):
        problem = f"{rule}, {name} is {shown(message)}"
        raise UnusableRow("wrong type", problem, "mend it or name the keys as tags of --map-keys")
    if role in (tags.observation_tag, tags.function_tag):
        problem = f"calls of tools are not rendered, {name} is of {role!r}"
        raise UnusableRow("tool turns", problem, "remove the row")
    roles = {tags.user_tag: "user", tags.assistant_tag: "assistant", tags.system_tag: "system"}
    if role not in roles:
        problem = f"a role must be one of {', '.join(roles)}, {name} is of {role!r}"
        raise UnusableRow("wrong roles", problem, "name it as a tag of --map-keys")
    return Turn(roles[role], text)
