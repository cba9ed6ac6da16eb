"""End a response when its text contains a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARGIN = 8  # tokens decoded before a string, as neighbours may change the text of a token


@dataclass(frozen=True)
class StopStrings:
    """Strings that end a response and stay in it.

    They are searched in the decoded text, because a string can be tokenized in several ways.
    Special tokens are not part of that text.
    """

    strings: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase = field(compare=False, repr=False)

    def is_completed_by(self, tokens: Sequence[int]) -> bool:
        """Whether the last of `tokens`, the response so far, completes one of the strings."""
        # one token for each byte of the longest string
        window = MARGIN + max(len(string.encode()) for string in self.strings)
        text = self._decode(tokens[-window:])
        if not any(string in text for string in self.strings):
            return False
        before = self._decode(tokens[-window:-1])
        return any(text.count(string) > before.count(string) for string in self.strings)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
