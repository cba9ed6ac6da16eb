"""Encode conversations as token ids: a template's special tokens by id, text by the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
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
    `allow_special_tokens`. Tokens that are added but not special are always read as tokens, as are
    those that a slow tokenizer splits off in its own way.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_name: str,
        with_responses: bool = False,
        allow_special_tokens: bool = False,
    ) -> None:
        """Look up the template's tokens in the tokenizer.

        with_responses: for conversations that end with the assistant's turn
        allow_special_tokens: read special tokens that the text of a turn spells as tokens
        Raises UserError when the tokenizer does not fit the template; with_responses also when it
        lacks the EOS token with which the template ends a response.
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

        If the template has no special tokens, the start of a prompt gets those that the tokenizer
        adds to a text, except EOS.
        """
        prompts = [tuple(render(self._template, turns)) for turns in conversations]
        return [each.token_ids for each in self._encode([[Segment(p, False)] for p in prompts])]

    def encode_labelled(self, conversations: Sequence[Sequence[Turn]]) -> list[Labelled]:
        """Return token ids and labels of conversations that end with the assistant's turn.

        Labels are the ids in responses, and IGNORED elsewhere.
        """
        return self._encode([render_segments(self._template, turns) for turns in conversations])

    def _encode(self, rendered: Sequence[Sequence[Segment]]) -> list[Labelled]:
        opening = [segments[0].pieces[0] for segments in rendered if segments[0].pieces]
        first = self._tokenize_pieces(opening, opens_prompt=True)
        rest = [
            piece
            for segments in rendered
            for n, segment in enumerate(segments)
            if not segment.is_response
            for piece in segment.pieces[0 if n else 1 :]
        ]
        prompt_ids = self._tokenize_pieces(rest, opens_prompt=False)
        response_ids = self._tokenize_responses(
            {
                (before, segment.pieces)
                for segments in rendered
                for segment, before in _with_borders(segments)
                if segment.is_response
            }
        )
        labelled = []
        for segments in rendered:
            result = Labelled([], [])
            for n, (segment, before) in enumerate(_with_borders(segments)):
                ids = [prompt_ids.get(piece, []) for piece in segment.pieces]
                if segment.is_response:
                    ids = response_ids[before, segment.pieces]
                elif n == 0 and segment.pieces:
                    ids[0] = first[segment.pieces[0]]
                flat = list(chain.from_iterable(ids))
                result.token_ids.extend(flat)
                result.labels.extend(flat if segment.is_response else [IGNORED] * len(flat))
            labelled.append(result)
        return labelled

    def _tokenize_pieces(
        self, pieces: Iterable[Piece], opens_prompt: bool
    ) -> dict[Piece, list[int]]:
        # Tokenize each text once: the text of the template between turns is in every prompt.
        different = dict.fromkeys(pieces)
        texts = [piece.text for piece in different if not piece.is_token]
        encoded = zip(texts, self._tokenize(texts, opens_prompt and self._is_plain), strict=True)
        ids_of = {Piece(text, False): ids for text, ids in encoded}
        return ids_of | {p: self._ids[p.text] for p in different if p.is_token}

    def _tokenize_responses(self, responses: set[Response]) -> dict[Response, list[list[int]]]:
        """Tokenize responses; return response -> list of token ids for each of its pieces.

        Some tokenizers prepend a blank to every text, and would put one before the response. So the
        prompt's last character is tokenized with the response, and its ids are cut off. If that
        character and the response share a token, the response is tokenized alone.
        """
        first = [(before, pieces[0].text) for before, pieces in responses if _is_text(pieces)]
        texts = sorted({t for before, text in first for t in (before, before + text, text) if t})
        ids_of = dict(zip(texts, self._tokenize(texts, False), strict=True))
        others = self._tokenize_pieces(
            (p for _, pieces in responses for p in pieces[_is_text(pieces) :]), False
        )
        found = {}
        for before, pieces in responses:
            ids = [others[piece] for piece in pieces[_is_text(pieces) :]]
            if _is_text(pieces):
                text = pieces[0].text
                start, whole = ids_of.get(before, []), ids_of[before + text]
                continues = bool(start) and whole[: len(start)] == start
                ids = [whole[len(start) :] if continues else ids_of[text], *ids]
            found[before, pieces] = ids
        return found

    def _tokenize(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            split_special_tokens=not self._allow_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning about texts over the model's length; --seq-length limits it
        )["input_ids"]
        num_eos = self._num_eos if add_special_tokens else 0
        return [ids[: len(ids) - num_eos] for ids in encoded]


Response = tuple[str, tuple[Piece, ...]]
"""(the character before the response, "" after a special token; its pieces)."""


def _is_text(pieces: Sequence[Piece]) -> bool:
    return bool(pieces) and not pieces[0].is_token


def _with_borders(segments: Sequence[Segment]) -> Iterator[tuple[Segment, str]]:
    last = Piece("", True)
    for segment in segments:
        yield segment, "" if last.is_token else last.text[-1]
        last = segment.pieces[-1] if segment.pieces else last


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, name: str, template: Template
) -> dict[str, list[int]]:
    """Return token -> [its id] for special tokens and stop words of the template, and for EOS.

    EOS maps to [] where the tokenizer has none. Raises UserError if the vocabulary lacks a token,
    or has a string as one token that the template writes as text.
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
