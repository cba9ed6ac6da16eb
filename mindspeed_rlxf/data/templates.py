"""Convert conversation turns to the token ids expected by a model family.

A template is a set of patterns in TEMPLATES. `{text}` stands for a turn's text, `{system}` for the
filled `system` pattern in families with the system text inside the first user turn, `{eos}` for the
tokenizer's end-of-sequence token. The patterns follow the families' own chat templates, except the
wording in `qwen_r1`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.data.prompts import num_appended_eos
from mindspeed_rlxf.data.tokenizer import begin_once, prepended_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOS = "{eos}"


class Turn(NamedTuple):
    """One message; role is "system" (first turn only), "user" or "assistant"."""

    role: str
    text: str


class TemplateSegment(NamedTuple):
    """A template's special token (or EOS), or the text between two."""

    text: str
    is_token: bool


@dataclass(frozen=True)
class Template:
    """Patterns for the turns and the text around them."""

    user: str = "{text}"
    header: str = ""  # opens a response; a prompt ends with it
    response: str = "{text}{eos}"  # after the header, up to its end token
    separator: str = ""  # between a response and the next user turn
    system: str = "{text}\n"
    start: str = ""  # the family's beginning-of-text token, if it has one
    default_system: str = ""  # if the conversation has none; "" = no system turn
    # Single tokens in the patterns; without any, the prompt is plain text, to which the tokenizer
    # adds its own special tokens.
    special_tokens: tuple[str, ...] = ()
    stop_words: tuple[str, ...] = ()  # tokens ending a response besides the tokenizer's EOS
    # Strings in the patterns that must not be single tokens: they are in the family's later
    # tokenizers, which need other patterns.
    text_only: tuple[str, ...] = ()


def _chatml(default_system: str = "", user: str = "{text}") -> Template:
    return Template(
        system="<|im_start|>system\n{text}<|im_end|>\n",
        user=f"<|im_start|>user\n{user}<|im_end|>\n",
        header="<|im_start|>assistant\n",
        response="{text}<|im_end|>",
        separator="\n",
        default_system=default_system,
        special_tokens=("<|im_start|>", "<|im_end|>"),
        stop_words=("<|im_end|>",),
    )


_MISTRAL = Template(
    start="<s>",
    system="{text}\n\n",
    user="[INST] {system}{text} [/INST]",
    response=" {text}</s>",
    special_tokens=("<s>", "</s>"),
    stop_words=("</s>",),
    text_only=("[INST]", "[/INST]"),
)

TEMPLATES: Mapping[str, Template] = {
    "empty": Template(),
    "default": Template(
        user="Human: {text}\n", header="Assistant:", response=" {text}{eos}", separator="\n"
    ),
    "alpaca": Template(
        system="{text}\n\n",
        user="### Instruction:\n{text}\n\n",
        header="### Response:\n",
        separator="\n\n",
        default_system=(
            "Below is an instruction that describes a task. "
            "Write a response that appropriately completes the request."
        ),
    ),
    "chatml": _chatml(),
    "trl": Template(),
    "llama2": Template(
        system="<<SYS>>\n{text}\n<</SYS>>\n\n",
        user="<s>[INST] {system}{text} [/INST]",
        response=" {text} </s>",
        special_tokens=("<s>", "</s>"),
        stop_words=("</s>",),
    ),
    "llama3": Template(
        start="<|begin_of_text|>",
        system="<|start_header_id|>system<|end_header_id|>\n\n{text}<|eot_id|>",
        user="<|start_header_id|>user<|end_header_id|>\n\n{text}<|eot_id|>",
        header="<|start_header_id|>assistant<|end_header_id|>\n\n",
        response="{text}<|eot_id|>",
        special_tokens=(
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ),
        stop_words=("<|eot_id|>",),
    ),
    "mistral": _MISTRAL,
    "mixtral": _MISTRAL,
    "qwen": _chatml("You are a helpful assistant."),
    "qwen25": _chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "qwen3": _chatml(),
    "qwen_r1": _chatml(
        "You are a helpful assistant.",
        "Work out the answer to what follows. First write how you think about it between <think> "
        "and </think>, then what you answer between <answer> and </answer>, and in it the final "
        "result as \\boxed{}.\n{text}",
    ),
    "qwen_math_r1": _chatml(
        "Please reason step by step, and put your final answer within \\boxed{}."
    ),
}
"""Name (`--prompt-type`) -> template. Texts of turns are not trimmed."""


def render(template: Template, turns: Sequence[Turn]) -> list[TemplateSegment]:
    """Render a conversation as a prompt, ending with the header of the next response.

    The text between two special tokens is one piece, so it is tokenized as a whole. The template's
    default replaces a missing system turn.
    """
    system = turns[0].text if turns[0].role == "system" else template.default_system
    has_system = system or turns[0].role == "system"
    system_pieces: list[TemplateSegment] = []
    if has_system:
        system_pieces = _fill(template, template.system, text=[TemplateSegment(system, False)])
    pieces = _fill(template, template.start)
    if "{system}" not in template.user:
        pieces += system_pieces
        system_pieces = []
    for role, text in turns:
        turn_text = [TemplateSegment(text, False)]
        if role == "user":
            pieces += _fill(template, template.user, text=turn_text, system=system_pieces)
            system_pieces = []  # in the first user turn alone
        elif role == "assistant":
            pattern = template.header + template.response + template.separator
            pieces += _fill(template, pattern, text=turn_text)
    pieces += _fill(template, template.header)
    joined: list[TemplateSegment] = []
    for is_token, group in groupby(pieces, key=lambda piece: piece.is_token):
        if is_token:
            joined += group
            continue
        text = "".join(piece.text for piece in group)
        if text:
            joined.append(TemplateSegment(text, False))
    return joined


def _fill(
    template: Template, pattern: str, **values: Sequence[TemplateSegment]
) -> list[TemplateSegment]:
    pieces: list[TemplateSegment] = []
    for text in _split_pattern(template.special_tokens, pattern):
        if text in ("{text}", "{system}"):
            pieces += values[text[1:-1]]
        elif text:
            pieces.append(TemplateSegment(text, text == EOS or text in template.special_tokens))
    return pieces


@cache
def _split_pattern(special_tokens: tuple[str, ...], pattern: str) -> list[str]:
    splitter = "|".join(map(re.escape, ("{text}", "{system}", EOS, *special_tokens)))
    return re.split(f"({splitter})", pattern)


class PromptEncoder:
    """Encodes conversations with one template and one tokenizer.

    A special token spelled in a turn's text is read as text (`split_special_tokens`), unless
    `allow_special_tokens`; added tokens which are not special are always read as tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_name: str,
        allow_special_tokens: bool = False,
    ) -> None:
        """Look up the template's tokens in the tokenizer.

        Raises UserError if the vocabulary lacks one, or has one which the template writes as text.
        """
        template = TEMPLATES[template_name]
        self._tokenizer = tokenizer
        self._template = template
        self._allow_special_tokens = allow_special_tokens
        vocabulary = tokenizer.get_vocab()
        needed = dict.fromkeys((*template.special_tokens, *template.stop_words))
        missing = [token for token in needed if token not in vocabulary]
        foreign = [text for text in template.text_only if text in vocabulary]
        if missing or foreign:
            name = f"the tokenizer {tokenizer.name_or_path!r}"
            if missing:
                rule = f"needs the token {missing[0]!r}, {name} does not have it"
            else:
                rule = f"writes {foreign[0]!r} as text, in {name} it is one token"
            remedy = "use the template or the tokenizer of the model's family"
            raise UserError(Problem("--prompt-type", rule, template_name, remedy))
        eos = tokenizer.eos_token_id
        self._ids = {token: [int(vocabulary[token])] for token in needed}
        self._ids[EOS] = [] if eos is None else [int(eos)]
        self.stop_token_ids = [self._ids[word][0] for word in template.stop_words]
        self._is_plain = not template.special_tokens
        self._num_eos = num_appended_eos(tokenizer) if self._is_plain else 0
        self._start = prepended_ids(tokenizer) if self._is_plain and allow_special_tokens else []

    def encode(self, conversations: Sequence[Sequence[Turn]]) -> list[list[int]]:
        """Return each conversation's prompt token ids, ending with the header of a response.

        If the template has no special tokens, a prompt begins with those the tokenizer adds.
        """
        prompts = [render(self._template, turns) for turns in conversations]
        # Each text once: every prompt has the template's text between turns.
        opening_texts: set[str] = set()  # texts that begin a prompt
        later_texts: set[str] = set()
        for pieces in prompts:
            for position, piece in enumerate(pieces):
                if not piece.is_token:
                    texts = later_texts if position else opening_texts
                    texts.add(piece.text)
        ids_of_opening = self._tokenize(sorted(opening_texts), self._is_plain)
        ids_of_later = self._tokenize(sorted(later_texts), False)
        encoded = []
        for pieces in prompts:
            ids: list[int] = []
            for position, piece in enumerate(pieces):
                if piece.is_token:
                    ids += self._ids[piece.text]
                elif position == 0:
                    ids += ids_of_opening[piece.text]
                else:
                    ids += ids_of_later[piece.text]
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
        start = self._start if add_special_tokens else []  # a text may have its own BOS
        ids_of_text = {}
        for text, ids in zip(texts, encoded, strict=True):
            ids_of_text[text] = begin_once(ids[: len(ids) - num_eos], start)
        return ids_of_text
