"""Fill in a tokenizer's chat template, which transformers runs in a sandbox."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]


def fill_in(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterable[Sequence[Message]],
    variables: Mapping[str, Any],
) -> Iterator[tuple[str, str]]:
    """Fill the chat template with each conversation.

    Yields (text, ""), where the text ends with the generation prompt, or ("", reason) if the
    template refuses the conversation.

    Args:
        variables: passed to the template (chat_template_kwargs).
    """
    return (_fill_one(tokenizer, each, variables) for each in conversations)


def _fill_one(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], variables: Mapping[str, Any]
) -> tuple[str, str]:
    """Fill the chat template with one conversation; return (text, "") or ("", reason).

    Catches every error of the template. Fields of messages that are None are left out.
    """
    try:
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        text = tokenizer.apply_chat_template(
            given, tokenize=False, add_generation_prompt=True, **variables
        )
    except RecursionError:  # its own message depends on the depth of the stack
        return "", "it calls itself without end"
    except Exception as error:  # any type, because the template is a program
        return "", (str(error).splitlines() or [type(error).__name__])[0]
    return str(text), ""
