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
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {int(i): str(token) for i, token in added.items() if token.special}
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return {**marked, **{int(i): str(token) for i, token in named}}


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
        kept = {i for i, token in special.items() if any(s.endswith(token) for s in stop_strings)}
        self._behind = {tokenizer.eos_token_id, tokenizer.pad_token_id} - kept
        self._ends = set(special) - kept  # of the tokenizer, the model or a template

    def prompt(self, ids: Sequence[int]) -> str:
        """Return a prompt's text."""
        start = next((n for n, i in enumerate(ids) if i not in self._before), len(ids))
        return decode(self._tokenizer, ids[start:])

    def response(self, ids: Sequence[int], has_ended: bool) -> str:
        """Return a response's text; `has_ended` = its last token may be any EOS."""
        kept = list(ids)
        if has_ended and kept and kept[-1] in self._ends:
            kept.pop()
        while kept and kept[-1] in self._behind:
            kept.pop()
        return decode(self._tokenizer, kept)
