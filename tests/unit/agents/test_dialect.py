"""What stands before the first turn, in chats and behind prompts that are text."""

from typing import Any

import pytest

from mindspeed_rlxf.agents.conversation import ChatTemplate
from mindspeed_rlxf.agents.dialect import Dialect
from mindspeed_rlxf.data.decoding import RewardTexts
from tests.unit.agents.chat_templates import tokenizer_of

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
GIVEN = [{"role": "user", "content": "And 3?"}]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def dialect_of(family: str, is_chat: bool) -> Dialect:
    tokenizer = tokenizer_of(family)
    template = ChatTemplate(tokenizer, [tokenizer.eos_token_id], TOOLS)
    return Dialect(template, RewardTexts(tokenizer), TOOLS, is_chat)


def test_what_is_given_before_the_first_turn_has_no_empty_turn_before_it() -> None:
    chat, plain = dialect_of("chatml", True), dialect_of("chatml", False)
    decode = tokenizer_of("chatml").decode
    assert chat.opening_ids([], False) == plain.opening_ids([], False) == []
    opened = decode(chat.opening_ids(GIVEN, True))
    assert opened == "<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n"
    assert decode(chat.opening_ids([], True)) == "<|im_start|>assistant\n"
    begun = [{"role": "assistant", "content": "It is"}]
    assert decode(chat.opening_ids(begun, False)) == "It is"
    assert decode(plain.opening_ids(GIVEN, False)) == "And 3?"
    with pytest.raises(ValueError, match="gives_first=True"):
        chat.opening_ids(GIVEN, False)


def test_calls_count_once_the_thought_of_the_header_has_ended() -> None:
    for family, texts in (("think", (CALL, f"</think>{CALL}")), ("chatml", ("", CALL))):
        counts = [len(dialect_of(family, True).tool_calls(text)) for text in texts]
        assert counts == [0, 1]
    assert len(dialect_of("think", False).tool_calls(CALL)) == 1, "text has no header"
