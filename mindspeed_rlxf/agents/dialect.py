"""How the messages of a conversation become tokens, and its turns text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspeed_rlxf.agents.session import Message, ToolCall
from mindspeed_rlxf.data.decoding import RewardTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PlainDialect:
    """For rows whose prompt is text: an observation is the text of its messages, as it is."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: RewardTexts) -> None:
        self._tokenizer, self._texts = tokenizer, texts

    def observation_ids(self, messages: Sequence[Message], ended_with_eos: bool) -> list[int]:
        """Return the tokens of the messages' contents; special tokens in them are text."""
        text = "".join(str(message["content"]) for message in messages)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        return ids

    def turn_text(self, token_ids: Sequence[int], has_ended: bool) -> str:
        """Return a turn's text without EOS and padding."""
        return self._texts.response(token_ids, has_ended)

    def tool_calls(self, text: str) -> list[ToolCall]:
        """Return []: a text prompt offers no tools."""
        return []
