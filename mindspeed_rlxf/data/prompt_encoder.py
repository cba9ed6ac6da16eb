"""Encode conversations as token ids: a template's special tokens by id, text by the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.data.prompts import num_appended_eos
from mindspeed_rlxf.data.templates import (
    EOS,
    TEMPLATES,
    Piece,
    Segment,
    Template,
    Turn,
    render,
    render_segments,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # label of a token that is not trained on


class Labelled(NamedTuple):
    """A tokenized conversation.

    token_ids, labels: [tokens]; a label is the token's id in a response, elsewhere IGNORED
    """

    token_ids: list[int]
    labels: list[int]


class PromptEncoder:
    """Encodes conversations with one template and one tokenizer.

    A special token spelled in the text of a turn is read as text (`split_special_tokens`), unless
    `allow_special_tokens`; tokens that are added but not special are always read as tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_name: str,
        with_responses: bool = False,
        allow_special_tokens: bool = False,
    ) -> None:
        """Look up the template's tokens in the tokenizer.

        Raises UserError if the tokenizer lacks one, or `with_responses` (conversations that end
        with the assistant's turn) the EOS token that ends a response.
        """
        self._tokenizer, self._template = tokenizer, TEMPLATES[template_name]
        self._allow_special_tokens = allow_special_tokens
        self._ids = _token_ids(tokenizer, template_name, self._template)
        if with_responses and EOS in self._template.response and not self._ids[EOS]:
            rule = "ends a response with the tokenizer's EOS token"
            rule = f"{rule}, {tokenizer.name_or_path!r} has none"
            remedy = "set eos_token in its tokenizer_config.json"
            raise UserError(Problem("--prompt-type", rule, template_name, remedy))
        self.stop_token_ids = [self._ids[word][0] for word in self._template.stop_words]
        self._is_plain = not self._template.special_tokens
        self._num_eos = num_appended_eos(tokenizer) if self._is_plain else 0

    def encode(self, conversations: Sequence[Sequence[Turn]]) -> list[list[int]]:
        """Return the token ids of each conversation as a prompt; the header of a response ends it.

        If the template has no special tokens, a prompt begins with those that the tokenizer adds.
        """
        prompts = [tuple(render(self._template, turns)) for turns in conversations]
        return [each.token_ids for each in self._encode([[Segment(p, False)] for p in prompts])]

    def encode_labelled(self, conversations: Sequence[Sequence[Turn]]) -> list[Labelled]:
        """Return token ids and labels of conversations that end with the assistant's turn."""
        return self._encode([render_segments(self._template, turns) for turns in conversations])

    def _encode(self, rendered: Sequence[Sequence[Segment]]) -> list[Labelled]:
        conversations = [list(_list_pieces(segments)) for segments in rendered]
        # Each text once: the text of the template between turns is in every prompt.
        opening = {pieces[0][0].text for pieces in conversations if not pieces[0][0].is_token}
        others = {
            text
            for pieces in conversations
            for piece, before, _ in pieces[1:]
            for text in (before, before + piece.text, piece.text)
            if text and not piece.is_token
        }
        ids_of_opening = self._tokenize(sorted(opening), self._is_plain)
        ids_of = self._tokenize(sorted(others), False)
        found = []
        for pieces in conversations:
            result = Labelled([], [])
            for place, (piece, before, is_response) in enumerate(pieces):
                if piece.is_token:
                    ids = self._ids[piece.text]
                elif place == 0:
                    ids = ids_of_opening[piece.text]
                else:
                    # Some tokenizers prepend a blank to every text, and would put one before a
                    # response. So the prompt's last character is tokenized with it, and its ids
                    # are cut off, unless that character and the response share a token.
                    ids, start = ids_of[before + piece.text], ids_of.get(before, [])
                    is_apart = bool(start) and ids[: len(start)] == start
                    ids = ids[len(start) :] if is_apart else ids_of[piece.text]
                result.token_ids.extend(ids)
                result.labels.extend(ids if is_response else [IGNORED] * len(ids))
            found.append(result)
        return found

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


def _list_pieces(segments: Sequence[Segment]) -> Iterator[tuple[Piece, str, bool]]:
    """Yield (piece, the character before it if it begins a response after text, is_response)."""
    last = ""
    for segment in segments:
        for place, piece in enumerate(segment.pieces):
            yield piece, last if segment.is_response and place == 0 else "", segment.is_response
            last = "" if piece.is_token else piece.text[-1]


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, name: str, template: Template
) -> dict[str, list[int]]:
    """Return token -> [its id] for the template's tokens and EOS, which has [] if it is missing.

    Raises UserError if the vocabulary lacks a token, or has one that the template writes as text.
    """
    vocabulary = tokenizer.get_vocab()
    needed = dict.fromkeys((*template.special_tokens, *template.stop_words))
    remedy = "use the template or the tokenizer of the model's family"
    if missing := [token for token in needed if token not in vocabulary]:
        found = f"the tokenizer {tokenizer.name_or_path!r} does not have it"
        raise UserError(
            Problem("--prompt-type", f"needs the token {missing[0]!r}, {found}", name, remedy)
        )
    if foreign := [text for text in template.text_only if text in vocabulary]:
        found = f"in the tokenizer {tokenizer.name_or_path!r} it is one token"
        raise UserError(
            Problem("--prompt-type", f"writes {foreign[0]!r} as text, {found}", name, remedy)
        )
    eos = tokenizer.eos_token_id
    ids = {token: [int(vocabulary[token])] for token in needed}
    return ids | {EOS: [] if eos is None else [int(eos)]}
