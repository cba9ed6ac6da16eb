"""Conversations become token ids: a template's special tokens by id, text by the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.data.prompts import num_appended_eos
from mindspeed_rlxf.data.templates import TEMPLATES, Piece, Turn, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Fills one template for one tokenizer.

    A special token spelled in the text of a turn stays ordinary text (`split_special_tokens`),
    except in `empty` and `trl`, whose text is the whole prompt. What a tokenizer lists as an added
    but not as a special token, or a slow one splits on its own account, is beyond this.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_name: str) -> None:
        """Raises UserError when the tokenizer lacks a token of the template."""
        self._tokenizer, self._template = tokenizer, TEMPLATES[template_name]
        vocabulary = tokenizer.get_vocab()
        needed = dict.fromkeys((*self._template.special_tokens, *self._template.stop_words))
        missing = [token for token in needed if token not in vocabulary]
        if missing:
            raise UserError(
                f"--prompt-type={template_name} needs the token {missing[0]!r}, the tokenizer "
                f"{tokenizer.name_or_path!r} does not have it; use the template or the tokenizer "
                "of the model's family"
            )
        self._ids = {token: int(vocabulary[token]) for token in needed}
        self.stop_token_ids = [self._ids[word] for word in self._template.stop_words]
        self._is_plain = not self._template.special_tokens
        self._num_eos = num_appended_eos(tokenizer) if self._is_plain else 0

    def encode(self, conversations: Sequence[Sequence[Turn]]) -> list[list[int]]:
        """Token ids of each prompt, the response's header included; one tokenizer call for all."""
        prompts = [render(self._template, turns) for turns in conversations]
        # Each text once: what a template puts between the turns is the same in every prompt.
        texts = dict.fromkeys(p.text for pieces in prompts for p in pieces if not p.is_token)
        encoded = zip(texts, self._tokenized(list(texts)), strict=True)
        ids_of = {Piece(text, False): ids for text, ids in encoded}
        ids_of |= {Piece(token, True): [i] for token, i in self._ids.items()}
        return [list(chain.from_iterable(map(ids_of.__getitem__, p))) for p in prompts]

    def _tokenized(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(
            texts,
            add_special_tokens=self._is_plain,
            split_special_tokens=not self._template.verbatim,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no word about texts over the model's length: that is for --seq-length
        )["input_ids"]
        return [ids[: len(ids) - self._num_eos] for ids in encoded]
