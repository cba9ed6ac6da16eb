"""How the messages of a conversation become tokens, and its turns text and calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rlxf.agents.conversation import ChatTemplate
from mindspeed_rlxf.agents.session import Message, ToolCall
from mindspeed_rlxf.agents.tool_calls import parse_tool_calls
from mindspeed_rlxf.data.decoding import RewardTexts


class Dialect:
    """The chat template's, or for a prompt that is text the messages' contents as they are.

    Attributes:
        is_chat: Whether the prompt consists of messages.
    """

    def __init__(
        self,
        template: ChatTemplate,
        texts: RewardTexts,
        tools: Sequence[Mapping[str, Any]],
        is_chat: bool,
    ) -> None:
        """Use a template; `tools` have the JSON schemas of the tools that turns may call."""
        self._template, self._texts, self._tools = template, texts, tools
        self.is_chat = is_chat

    def prompt_text(self, token_ids: Sequence[int]) -> str:
        """Return a prompt's text."""
        return self._texts.prompt(token_ids)

    def observation_ids(self, messages: Sequence[Message], eos_id: int | None) -> list[int]:
        """Return the ids between a turn and the next one; `eos_id` = the EOS that ended it."""
        if not self.is_chat:
            return self._template.text_ids(messages)
        return self._template.observation_ids(messages, eos_id)

    def opening_ids(self, messages: Sequence[Message], gives_first: bool) -> list[int]:
        """Return the ids between the prompt and the first turn; [] if nothing was given.

        With `gives_first` a chat's prompt has no header of the first turn.

        Raises:
            ValueError: The prompt of a chat has it, and messages were given.
        """
        is_continued = all(message["role"] == "assistant" for message in messages)
        if not self.is_chat or (is_continued and not gives_first):
            return self._template.text_ids(messages)
        if not gives_first:
            raise ValueError(
                "an agent that gives messages before its first turn must be registered by "
                "register_agent(NAME, gives_first=True): the prompt ends with the turn's header"
            )
        return self._template.opening_ids(messages)

    def turn_text(self, token_ids: Sequence[int], has_ended: bool) -> str:
        """Return a turn's text without EOS and padding; whether an EOS or stop string ended it."""
        return self._texts.response(token_ids, has_ended)

    def tool_calls(self, text: str) -> list[ToolCall]:
        """Return the calls in a turn's text; [] without tools."""
        if not self._tools:
            return []
        return parse_tool_calls(text, self._tools, self.is_chat and self._template.opens_thought)
