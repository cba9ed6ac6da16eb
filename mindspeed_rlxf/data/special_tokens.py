"""Read special tokens that a user's text spells as text, and those of a chat template as tokens."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SpecialTokens:
    """The special tokens of one tokenizer.

    While a chat template is filled in, each special token that a user's text spells is replaced by
    a random word, which no text can contain.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        names = {*tokenizer.all_special_tokens, *(str(t) for t in added if t.special)} - {""}
        self._names = sorted(names, key=lambda name: (-len(name), name))
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._tokenizer, self._nonce = tokenizer, secrets.token_hex(12)
        self._words = re.compile(rf"zq{self._nonce}n(\d+)z")

    def are_in(self, value: Any) -> bool:
        """Whether a text, or a text inside lists and dicts (keys too), contains a special token."""
        return bool(self.hide(value) != value)

    def hide(self, value: Any) -> Any:
        """Return `value` with each special token in its texts replaced by the token's random word.

        value: text, or lists and dicts (also their keys) with texts; other values are returned
               unchanged
        """
        if isinstance(value, str):
            number = self._names.index
            return self._pattern.sub(lambda found: f"zq{self._nonce}n{number(found[0])}z", value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list) else value

    def has_words(self, text: str) -> bool:
        return self._nonce in text

    def restore(self, text: str) -> str:
        """Replace every random word in a text by its special token."""
        return self._words.sub(lambda found: self._names[int(found[1])], text)

    def token_ids(self, text: str) -> list[int]:
        """Tokenize a filled-in chat template; no special tokens are added.

        Special tokens become their ids. The text between two of them is tokenized alone. Words that
        `hide` inserted become the spelling of their special token, tokenized as plain text.
        """
        ids, start = [], 0
        for found in self._pattern.finditer(text):
            ids += self._text_ids(text[start : found.start()])
            ids.append(int(self._tokenizer.convert_tokens_to_ids(found[0])))
            start = found.end()
        return ids + self._text_ids(text[start:])

    def _text_ids(self, text: str) -> list[int]:
        if not text:
            return []
        ids: list[int] = self._tokenizer(
            self.restore(text), add_special_tokens=False, split_special_tokens=True
        )["input_ids"]
        return ids
