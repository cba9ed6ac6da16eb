"""Texts of token ids, as rewards and files read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of token ids as it was generated: special tokens and blanks included.

    transformers 4 would remove blanks before punctuation where a tokenizer asks for it, and its
    slow tokenizers would add blanks around special tokens.
    """
    return str(
        tokenizer.decode(
            list(ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )
    )


def decode_without_special(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text between special tokens, with its blanks."""
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the token of each special id: those that the tokenizer names, and marked ones."""
    tokens: dict[int, str] = {}
    for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if token.special:
            tokens[int(token_id)] = str(token)
    for token_id, token in zip(
        tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True
    ):
        tokens[int(token_id)] = str(token)
    return tokens


class RewardTexts:
    """Decodes prompts and responses for rules, functions and reward servers.

    Special tokens stay in the text, as `<think>` and `<answer>` may be such, but those that frame
    it: BOS and padding before a prompt, EOS and padding behind a response.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_strings: Collection[str] = ()
    ) -> None:
        """Use a tokenizer. A special token that ends one of `stop_strings` stays in a response."""
        special = special_ids(tokenizer)
        self._tokenizer = tokenizer
        self._before = {tokenizer.bos_token_id, tokenizer.pad_token_id}
        of_stop_strings = set()
        for token_id, token in special.items():
            if any(stop_string.endswith(token) for stop_string in stop_strings):
                of_stop_strings.add(token_id)
        self._behind = {tokenizer.eos_token_id, tokenizer.pad_token_id} - of_stop_strings
        self._ends = set(special) - of_stop_strings  # of the tokenizer, the model or a template

    def prompt(self, ids: Sequence[int]) -> str:
        """Return a prompt's text."""
        start = 0
        while start < len(ids) and ids[start] in self._before:
            start += 1
        return decode(self._tokenizer, ids[start:])

    def response(self, ids: Sequence[int], has_ended: bool) -> str:
        """Return a response's text; `has_ended` = its last token may be any EOS."""
        text_ids = list(ids)
        if has_ended and text_ids and text_ids[-1] in self._ends:
            text_ids.pop()
        while text_ids and text_ids[-1] in self._behind:
            text_ids.pop()
        return decode(self._tokenizer, text_ids)
