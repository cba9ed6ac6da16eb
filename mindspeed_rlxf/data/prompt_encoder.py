"""Encode conversations as token ids: a template's special tokens by id, text by the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.data.prompts import num_appended_eos
from mindspeed_rlxf.data.templates import EOS, TEMPLATES, Turn, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Encodes conversations with one template and one tokenizer.

    A special token spelled in the text of a turn is read as text (`split_special_tokens`), unless
    `allow_special_tokens`; tokens that are added but not special are always read as tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_name: str,
        allow_special_tokens: bool = False,
    ) -> None:
        """Look up the template's tokens in the tokenizer.

        Raises UserError if the vocabulary lacks one, or has one that the template writes as text.
        """
        self._tokenizer, self._template = tokenizer, TEMPLATES[template_name]
        self._allow_special_tokens = allow_special_tokens
        template, vocabulary = self._template, tokenizer.get_vocab()
        needed = dict.fromkeys((*template.special_tokens, *template.stop_words))
        missing = [token for token in needed if token not in vocabulary]
        foreign = [text for text in template.text_only if text in vocabulary]
        if missing or foreign:
            name = f"the tokenizer {tokenizer.name_or_path!r}"
            rule = f"writes {next(iter(foreign), None)!r} as text, in {name} it is one token"
            if missing:
                rule = f"needs the token {missing[0]!r}, {name} does not have it"
            remedy = "use the template or the tokenizer of the model's family"
            raise UserError(Problem("--prompt-type", rule, template_name, remedy))
        eos = tokenizer.eos_token_id
        self._ids = {token: [int(vocabulary[token])] for token in needed}
        self._ids[EOS] = [] if eos is None else [int(eos)]
        self.stop_token_ids = [self._ids[word][0] for word in template.stop_words]
        self._is_plain = not template.special_tokens
        self._num_eos = num_appended_eos(tokenizer) if self._is_plain else 0

    def encode(self, conversations: Sequence[Sequence[Turn]]) -> list[list[int]]:
        """Return the token ids of each conversation as a prompt; the header of a response ends it.

        If the template has no special tokens, a prompt begins with those that the tokenizer adds.
        """
        prompts = [render(self._template, turns) for turns in conversations]
        # Each text once: the text of the template between turns is in every prompt.
        opening = {pieces[0].text for pieces in prompts if not pieces[0].is_token}
        others = {p.text for pieces in prompts for p in pieces[1:] if not p.is_token}
        ids_of_opening = self._tokenize(sorted(opening), self._is_plain)
        ids_of = self._tokenize(sorted(others), False)
        encoded = []
        for pieces in prompts:
            ids: list[int] = []
            for place, piece in enumerate(pieces):
                known = self._ids if piece.is_token else ids_of if place else ids_of_opening
                ids += known[piece.text]
            encoded.append(ids)
        return encoded

    def _tokenize(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[int]]:
        if not texts:
            return {}
        encoded = self._tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            split_special_tokens=not self._allow_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning about texts over the model's length; --seq-length limits it
        )["input_ids"]
        num_eos = self._num_eos if add_special_tokens else 0
        return {text: ids[: len(ids) - num_eos] for text, ids in zip(texts, encoded, strict=True)}
