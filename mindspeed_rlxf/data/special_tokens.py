"""Special tokens that the text of a user spells stay text; those of a chat template are tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SpecialTokens:
    """The special tokens of one tokenizer.

    A word stands for each one that a user's text spells, while a chat template is filled in: a
    random one, so that no text can hold it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        names = {*tokenizer.all_special_tokens, *(str(t) for t in added if t.special)} - {""}
        self._names = sorted(names, key=lambda name: (-len(name), name))
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._tokenizer, self._nonce = tokenizer, secrets.token_hex(12)
        self._words = re.compile(rf"zq{self._nonce}n(\d+)z")

    def spelled_in(self, value: Any) -> bool:
        """Whether a text, or a text inside lists and dicts, spells one."""
        if isinstance(value, str):
            return bool(self._pattern.search(value))
        if isinstance(value, dict):
            return any(map(self.spelled_in, (*value.keys(), *value.values())))
        return isinstance(value, list) and any(map(self.spelled_in, value))

    def hidden(self, value: Any) -> Any:
        """The same value with a word in place of each one."""
        if isinstance(value, str):
            return self._pattern.sub(self._word, value)
        if isinstance(value, dict):
            return {self.hidden(key): self.hidden(item) for key, item in value.items()}
        return [self.hidden(item) for item in value] if isinstance(value, list) else value

    def _word(self, found: re.Match[str]) -> str:
        return f"zq{self._nonce}n{self._names.index(found[0])}z"

    def hides(self, text: str) -> bool:
        return self._nonce in text

    def shown(self, text: str) -> str:
        """The text with every word turned back."""
        return self._words.sub(lambda found: self._names[int(found[1])], text)

    def token_ids(self, text: str) -> list[int]:
        """Ids of a filled-in template: what a word stands for is text, others are tokens.

        The text between two tokens is read on its own.
        """
        return [i for piece in self._pieces(text) for i in piece]

    def _pieces(self, text: str) -> Iterator[list[int]]:
        start = 0
        for found in self._pattern.finditer(text):
            yield self._text_ids(text[start : found.start()])
            yield [int(self._tokenizer.convert_tokens_to_ids(found[0]))]
            start = found.end()
        yield self._text_ids(text[start:])

    def _text_ids(self, text: str) -> list[int]:
        if not text:
            return []
        ids: list[int] = self._tokenizer(
            self.shown(text), add_special_tokens=False, split_special_tokens=True
        )["input_ids"]
        return ids
