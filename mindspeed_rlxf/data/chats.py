"""Fill in a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]


def fill_in(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], variables: Mapping[str, Any]
) -> tuple[str, str]:
    """Fill the chat template with one conversation.

    Returns (text, ""), where the text ends with the generation prompt, or ("", reason) if the
    template refuses the conversation. Fields of messages that are None are left out.
    variables: passed to the template (chat_template_kwargs)
    """
    given = [{k: v for k, v in message.items() if v is not None} for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            given, tokenize=False, add_generation_prompt=True, **variables
        )
    except RecursionError:  # its own message depends on the depth of the stack
        return "", "it calls itself without end"
    except Exception as error:  # any type, because the template is a program
        return "", (str(error).splitlines() or [type(error).__name__])[0]
    return str(text), ""
