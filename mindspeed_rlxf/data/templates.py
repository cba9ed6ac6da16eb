"""Prompt templates: how the turns of a conversation become the text that a model family expects.

Declarative: a template is a row of patterns in TEMPLATES. `{text}` stands for the text of a turn,
`{system}` for the filled `system` pattern where a family puts it inside the first user turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple


class Turn(NamedTuple):
    """One message; role is "system" (first turn only), "user" or "assistant"."""

    role: str
    text: str


class Piece(NamedTuple):
    """Part of a prompt: a special token of the template, or ordinary text around it."""

    text: str
    is_token: bool


@dataclass(frozen=True)
class Template:
    """Patterns of the turns, and what surrounds them.

    header:         opens the response; the prompt ends with it
    start:          opens the prompt (the family's beginning-of-text token, where it has one)
    default_system: system text of a conversation that has none; "" = no system turn
    special_tokens: strings in the patterns that are single tokens; none = plain text, which gets
                    what the tokenizer adds to any text
    stop_words:     tokens that end a response besides the tokenizer's EOS
    verbatim:       the text is the whole prompt and is read like any text, special tokens that it
                    spells included; otherwise such a spelling stays ordinary text
    """

    user: str = "{text}"
    assistant: str = "\n{text}\n"
    system: str = "{text}\n"
    header: str = ""
    start: str = ""
    default_system: str = ""
    special_tokens: tuple[str, ...] = ()
    stop_words: tuple[str, ...] = ()
    verbatim: bool = False


def _chatml(default_system: str = "") -> Template:
    return Template(
        system="<|im_start|>system\n{text}<|im_end|>\n",
        user="<|im_start|>user\n{text}<|im_end|>\n",
        assistant="<|im_start|>assistant\n{text}<|im_end|>\n",
        header="<|im_start|>assistant\n",
        default_system=default_system,
        special_tokens=("<|im_start|>", "<|im_end|>"),
        stop_words=("<|im_end|>",),
    )


TEMPLATES: Mapping[str, Template] = {
    "empty": Template(verbatim=True),
    "default": Template(
        user="Human: {text}\n", assistant="Assistant: {text}\n", header="Assistant: "
    ),
    "chatml": _chatml(),
    "trl": Template(verbatim=True),
    "llama2": Template(
        system="<<SYS>>\n{text}\n<</SYS>>\n\n",
        user="<s>[INST] {system}{text} [/INST]",
        assistant=" {text} </s>",
        special_tokens=("<s>", "</s>"),
        stop_words=("</s>",),
    ),
    "llama3": Template(
        start="<|begin_of_text|>",
        system="<|start_header_id|>system<|end_header_id|>\n\n{text}<|eot_id|>",
        user="<|start_header_id|>user<|end_header_id|>\n\n{text}<|eot_id|>",
        assistant="<|start_header_id|>assistant<|end_header_id|>\n\n{text}<|eot_id|>",
        header="<|start_header_id|>assistant<|end_header_id|>\n\n",
        special_tokens=(
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ),
        stop_words=("<|eot_id|>",),
    ),
    "qwen": _chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "qwen3": _chatml(),
}
"""Name (`--prompt-type`) -> template. Texts of turns are taken as they are, not trimmed."""


Run = tuple[str | int, ...]
"""Neighbouring text: of the template, or the place of a turn whose text goes there."""


def render(template: Template, turns: Sequence[Turn]) -> list[Piece]:
    """The prompt of a conversation, up to and with the header of the response.

    Neighbouring text is one piece, so that it is tokenized as in the whole prompt.
    """
    pieces = []
    for part in _layout(template, tuple(turn.role for turn in turns)):
        if isinstance(part, Piece):
            pieces.append(part)
        elif text := "".join([turns[i].text if isinstance(i, int) else i for i in part]):
            pieces.append(Piece(text, False))
    return pieces


@lru_cache(maxsize=1024)
def _layout(template: Template, roles: tuple[str, ...]) -> tuple[Piece | Run, ...]:
    """The prompt of every conversation with these roles."""
    system: str | int = 0 if roles[0] == "system" else template.default_system
    pending = [] if system == "" else _filled(template, template.system, text=[system])
    parts = _filled(template, template.start)
    if "{system}" not in template.user:
        parts, pending = parts + pending, []
    for place, role in enumerate(roles):
        if role == "user":
            parts += _filled(template, template.user, text=[place], system=pending)
            pending = []
        elif role == "assistant":
            parts += _filled(template, template.assistant, text=[place])
    parts += _filled(template, template.header)
    layout: list[Piece | Run] = []
    for is_token, group in groupby(parts, key=lambda part: isinstance(part, Piece)):
        if is_token:
            layout += [part for part in group if isinstance(part, Piece)]
        else:
            layout.append(tuple(part for part in group if not isinstance(part, Piece)))
    return tuple(layout)


def _filled(
    template: Template, pattern: str, **values: Sequence[Piece | str | int]
) -> list[Piece | str | int]:
    """`pattern` with its fields replaced and its special tokens set apart."""
    splitter = "|".join([r"\{text\}", r"\{system\}", *map(re.escape, template.special_tokens)])
    parts: list[Piece | str | int] = []
    for part in re.split(f"({splitter})", pattern):
        if part in ("{text}", "{system}"):
            parts += values[part[1:-1]]
        elif part in template.special_tokens:
            parts.append(Piece(part, True))
        elif part:
            parts.append(part)
    return parts
