"""Our prompt templates give the same text as the chat templates of the models' tokenizers.

RLXF_TOKENIZERS names a folder of tokenizer folders, whose names begin with the name of a template
(`qwen25-7b-instruct`, `llama3`). Without it, the comparison is tested with stand-ins.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from mindspeed_rlxf.data.prompt_encoder import PromptEncoder
from mindspeed_rlxf.data.templates import TEMPLATES, Turn
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from tests.unit.data.byte_tokenizer import byte_tokenizer

FOLDER = os.environ.get("RLXF_TOKENIZERS")
CONVERSATIONS = {
    "one turn": [Turn("user", "2 + 2 = ?")],
    "a system text": [Turn("system", "Be brief."), Turn("user", "größe 数")],
    "a history": [Turn("user", "Hi"), Turn("assistant", "Hello."), Turn("user", "Bye")],
}
NO_SYSTEM = ("mistral", "mixtral")  # where the chat templates of the versions differ
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN25 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen, created by Alibaba "
    "Cloud. You are a helpful assistant.<|im_end|>\n{% endif %}" + CHATML
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def differences(tokenizer: PreTrainedTokenizerBase, name: str) -> list[str]:
    """Conversations whose prompt is not that of the tokenizer's chat template."""
    encoder, found = PromptEncoder(tokenizer, name), []
    for what, turns in CONVERSATIONS.items():
        if name in NO_SYSTEM and turns[0].role == "system":
            continue
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        (ids,) = encoder.encode([turns])
        if ids != expected:
            found.append(f"{what}: {tokenizer.decode(ids)!r} is not {text!r}")
    return found


def stand_in(chat_template: str) -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.mark.parametrize(
    ("name", "chat_template"),
    [("chatml", CHATML), ("qwen3", CHATML), ("qwen25", QWEN25), ("llama3", LLAMA3)],
)
def test_a_template_is_that_of_its_stand_in(name: str, chat_template: str) -> None:
    assert differences(stand_in(chat_template), name) == []


def test_the_comparison_finds_what_differs() -> None:
    (one, history) = differences(stand_in(QWEN25), "chatml")
    assert one.startswith("one turn: ") and history.startswith("a history: ")
    assert len(differences(stand_in(LLAMA3), "chatml")) == 3


@pytest.mark.skipif(FOLDER is None, reason="RLXF_TOKENIZERS names no folder of tokenizers")
def test_templates_are_those_of_the_models() -> None:
    folders = sorted(path for path in Path(FOLDER or "").iterdir() if path.is_dir())
    names = sorted(TEMPLATES, key=len, reverse=True)
    found = []
    for folder in folders:
        name = next((name for name in names if folder.name.startswith(name)), None)
        assert name is not None, f"{folder.name} must begin with one of {', '.join(TEMPLATES)}"
        found += [
            f"{folder.name}: {line}" for line in differences(load_tokenizer(str(folder)), name)
        ]
    assert found == [] and folders
