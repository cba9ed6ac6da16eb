"""Split a response into the texts of its tokens, which joined give the response."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MAX_TOKENS = 4  # that make one character together; UTF-8 has at most four bytes


class TokenPieces:
    """Splits responses into the texts of their tokens.

    A token that ends inside a character has "" as its text, and the token that completes the
    character has all of it. Handles byte-level tokens (GPT-2), and byte tokens and U+2581 for a
    space (SentencePiece); other tokens are decoded one by one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._bytes_of = tokenizer, cache(self._find_bytes)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._bytes = (
            _byte_alphabet() if "ByteLevel" in repr(getattr(backend, "decoder", "")) else {}
        )

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token id; bytes that are not UTF-8 become U+FFFD.

        A character that spans several tokens is the text of the last of them; the others get "".
        Bytes that are not UTF-8 after MAX_TOKENS tokens, or at the end of `ids`, are decoded as
        they are.
        """
        pieces, left, waiting = [], b"", 0
        for count, token_id in enumerate(ids, 1):
            left, waiting = left + self._bytes_of(token_id), waiting + 1
            try:
                pieces.append(left.decode("utf-8"))
            except UnicodeDecodeError:
                if waiting < MAX_TOKENS and count < len(ids):
                    pieces.append("")
                    continue
                pieces.append(left.decode("utf-8", "replace"))
            left, waiting = b"", 0
        return pieces

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):  # not in the vocabulary
            return f"<{token_id}>".encode()
        if byte := BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        if self._bytes and all(letter in self._bytes for letter in token):
            return bytes(self._bytes[letter] for letter in token)
        if "\u2581" in token:
            return token.replace("\u2581", " ").encode("utf-8", "replace")
        return str(self._tokenizer.decode([token_id])).encode("utf-8", "replace")


def _byte_alphabet() -> dict[str, int]:
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in itself]
    letters = {chr(byte): byte for byte in itself}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}
