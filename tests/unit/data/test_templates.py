"""Templates give the text of their family, with the special tokens set apart."""

from __future__ import annotations

import pytest

from mindspeed_rlxf.data.templates import TEMPLATES, Piece, Turn, render

USER = [Turn("user", "Hi")]
CHAT = [Turn("system", "Be kind."), Turn("user", "A"), Turn("assistant", "B"), Turn("user", "C")]
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
LLAMA3_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"


def text_of(name: str, turns: list[Turn]) -> str:
    return "".join(piece.text for piece in render(TEMPLATES[name], turns))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("empty", "Hi"),
        ("trl", "Hi"),
        ("default", "Human: Hi\nAssistant: "),
        ("chatml", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (
            "qwen",
            f"<|im_start|>system\n{QWEN_SYSTEM}<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("llama2", "<s>[INST] Hi [/INST]"),
        (
            "llama3",
            f"<|begin_of_text|>{LLAMA3_HEADER.format('user')}Hi<|eot_id|>"
            f"{LLAMA3_HEADER.format('assistant')}",
        ),
    ],
)
def test_one_turn_ends_with_the_header_of_the_response(name: str, expected: str) -> None:
    assert text_of(name, USER) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("empty", "Be kind.\nA\nB\nC"),
        ("default", "Be kind.\nHuman: A\nAssistant: B\nHuman: C\nAssistant: "),
        (
            "qwen",
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nA<|im_end|>\n"
            "<|im_start|>assistant\nB<|im_end|>\n<|im_start|>user\nC<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "llama2",
            "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nA [/INST] B </s><s>[INST] C [/INST]",
        ),
        (
            "llama3",
            "<|begin_of_text|>"
            f"{LLAMA3_HEADER.format('system')}Be kind.<|eot_id|>"
            f"{LLAMA3_HEADER.format('user')}A<|eot_id|>"
            f"{LLAMA3_HEADER.format('assistant')}B<|eot_id|>"
            f"{LLAMA3_HEADER.format('user')}C<|eot_id|>{LLAMA3_HEADER.format('assistant')}",
        ),
    ],
)
def test_system_and_assistant_turns_are_kept(name: str, expected: str) -> None:
    assert text_of(name, CHAT) == expected


def test_only_the_template_writes_special_tokens() -> None:
    """A turn that spells one, or a field of the patterns, is ordinary text."""
    turns = [Turn("user", "{text}<|im_end|>{system}")]
    assert render(TEMPLATES["chatml"], turns) == [
        Piece("<|im_start|>", True),
        Piece("user\n{text}<|im_end|>{system}", False),
        Piece("<|im_end|>", True),
        Piece("\n", False),
        Piece("<|im_start|>", True),
        Piece("assistant\n", False),
    ]


def test_stop_words_are_those_of_the_family() -> None:
    stops = {name: template.stop_words for name, template in TEMPLATES.items()}
    assert stops == {
        "empty": (), "default": (), "trl": (), "chatml": ("<|im_end|>",), "llama2": ("</s>",),
        "llama3": ("<|eot_id|>",), "qwen": ("<|im_end|>",), "qwen3": ("<|im_end|>",),
    }  # fmt: skip
