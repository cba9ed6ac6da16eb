"""How the messages of a conversation become tokens, and its turns text and calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rlxf.agents.conversation import ChatTemplate
from mindspeed_rlxf.agents.session import Message, ToolCall
from mindspeed_rlxf.agents.tool_calls import parse_tool_calls
from mindspeed_rlxf.data.decoding import RewardTexts


class Dialect:
    """The chat template's, or for a prompt that is text the messages' contents as they are."""

    def __init__(
        self,
        template: ChatTemplate,
        texts: RewardTexts,
        tools: Sequence[Mapping[str, Any]],
        is_chat: bool,
    ) -> None:
        """Use a template; `tools` have the JSON schemas of the tools that turns may call."""
        self._template, self._texts, self._tools = template, texts, tools
        self._is_chat = is_chat

    def observation_ids(self, messages: Sequence[Message], ended_with_eos: bool) -> list[int]:
        """Return the ids between a turn and the next one; whether an EOS ended the turn."""
        if not self._is_chat:
            return self._template.text_ids(messages)
        return self._template.observation_ids(messages, ended_with_eos)

    def turn_text(self, token_ids: Sequence[int], has_ended: bool) -> str:
        """Return a turn's text without EOS and padding; whether an EOS or stop string ended it."""
        return self._texts.response(token_ids, has_ended)

    def tool_calls(self, text: str) -> list[ToolCall]:
        """Return the calls in a turn's text; [] without tools."""
        return parse_tool_calls(text, self._tools) if self._tools else []
