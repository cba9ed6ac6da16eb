"""Convert the turns of a conversation to the text that a model family expects.

A template is a set of patterns in TEMPLATES. `{text}` stands for the text of a turn, `{system}` for
the filled `system` pattern in families that put it inside the first user turn, `{eos}` for the
tokenizer's end-of-sequence token. The patterns follow the families' own chat templates, except for
the words of `qwen_r1`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

EOS = "{eos}"


class Turn(NamedTuple):
    """One message; role is "system" (first turn only), "user" or "assistant"."""

    role: str
    text: str


class Piece(NamedTuple):
    """Part of a prompt: a special token of the template (or EOS), or the text between two."""

    text: str
    is_token: bool


class Segment(NamedTuple):
    """Consecutive pieces. is_response: written by the assistant, its end token included"""

    pieces: tuple[Piece, ...]
    is_response: bool


@dataclass(frozen=True)
class Template:
    """Patterns of the turns and of the text around them.

    header:         opens a response; a prompt ends with it
    response:       what the assistant writes after the header, up to the token that ends it
    separator:      between a response and the next turn of the user
    start:          opens the prompt (the family's beginning-of-text token, where it has one)
    default_system: system text of a conversation that has none; "" = no system turn
    special_tokens: strings in the patterns that are single tokens; without any, the prompt is plain
                    text, to which the tokenizer adds its own special tokens
    stop_words:     tokens that end a response besides the tokenizer's EOS
    text_only:      strings in the patterns that must not be single tokens; in later tokenizers of
                    the family they are, and other patterns apply
    """

    user: str = "{text}"
    header: str = ""
    response: str = "{text}{eos}"
    separator: str = ""
    system: str = "{text}\n"
    start: str = ""
    default_system: str = ""
    special_tokens: tuple[str, ...] = ()
    stop_words: tuple[str, ...] = ()
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


Part = Piece | str | int
"""A special token, text of the template, or the index of a turn whose text is inserted."""


Run = tuple[str | int, ...]
"""Consecutive parts that are text or indices of turns, without special tokens."""


def render(template: Template, turns: Sequence[Turn]) -> list[Piece]:
    """Render a conversation as a prompt, which ends with the header of the next response.

    The text between two special tokens is one piece, so that it is tokenized as a whole.
    """
    return _insert_texts(_prompt_layout(template, tuple(turn.role for turn in turns)), turns)


def render_segments(template: Template, turns: Sequence[Turn]) -> list[Segment]:
    """Render a conversation that ends with the assistant's turn as segments, in order.

    Each response is a segment, and so is what stands before it. A segment whose texts are all empty
    has no pieces.
    """
    layout = _segment_layout(template, tuple(turn.role for turn in turns))
    return [Segment(tuple(_insert_texts(parts, turns)), response) for response, parts in layout]


def _insert_texts(layout: Sequence[Piece | Run], turns: Sequence[Turn]) -> list[Piece]:
    pieces = []
    for part in layout:
        if isinstance(part, Piece):
            pieces.append(part)
        elif text := "".join([turns[i].text if isinstance(i, int) else i for i in part]):
            pieces.append(Piece(text, False))
    return pieces


@lru_cache(maxsize=1024)
def _prompt_layout(template: Template, roles: tuple[str, ...]) -> tuple[Piece | Run, ...]:
    parts = [part for _, parts in _split_parts(template, roles) for part in parts]
    return _join_text([*parts, *_fill(template, template.header)])


@lru_cache(maxsize=1024)
def _segment_layout(
    template: Template, roles: tuple[str, ...]
) -> tuple[tuple[bool, tuple[Piece | Run, ...]], ...]:
    return tuple(
        (is_r, _join_text(parts)) for is_r, parts in _split_parts(template, roles) if parts
    )


def _split_parts(template: Template, roles: tuple[str, ...]) -> list[tuple[bool, list[Part]]]:
    """Return (whether it is a response, its parts) for each segment of turns with these roles.

    The last segment is no response; segments may be empty. A missing system turn is replaced by the
    template's default.
    """
    system: str | int = 0 if roles[0] == "system" else template.default_system
    pending = [] if system == "" else _fill(template, template.system, text=[system])
    parts = _fill(template, template.start)
    if "{system}" not in template.user:
        parts, pending = [*parts, *pending], []
    segments = []
    for i, role in enumerate(roles):
        if role == "user":
            parts += _fill(template, template.user, text=[i], system=pending)
            pending = []
        elif role == "assistant":
            parts += _fill(template, template.header)
            response = _fill(template, template.response, text=[i])
            segments += [(False, parts), (True, response)]
            parts = _fill(template, template.separator) if i + 1 < len(roles) else []
    return [*segments, (False, parts)]


def _join_text(parts: Sequence[Part]) -> tuple[Piece | Run, ...]:
    layout: list[Piece | Run] = []
    for is_token, group in groupby(parts, key=lambda part: isinstance(part, Piece)):
        if is_token:
            layout += [part for part in group if isinstance(part, Piece)]
        else:
            layout.append(tuple(part for part in group if not isinstance(part, Piece)))
    return tuple(layout)


def _fill(template: Template, pattern: str, **values: Sequence[Part]) -> list[Part]:
    """Split a pattern at its fields and special tokens; return the parts in order, no empty text.

    `{text}` and `{system}` are replaced by `values["text"]` and `values["system"]`; `{eos}` and the
    template's special tokens become special pieces.
    """
    fields = [re.escape(field) for field in ("{text}", "{system}", EOS)]
    splitter = "|".join([*fields, *map(re.escape, template.special_tokens)])
    parts: list[Part] = []
    for part in re.split(f"({splitter})", pattern):
        if part in ("{text}", "{system}"):
            parts += values[part[1:-1]]
        elif part == EOS or part in template.special_tokens:
            parts.append(Piece(part, True))
        elif part:
            parts.append(part)
    return parts
