"""A small real tokenizer, one id per character, and writers of prompt files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.unit.data.bench import Bench
from tests.unit.data.byte_tokenizer import write_tokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyz 0123456789+=:"
TOKENS = ["<unk>", "<bos>", "<eos>", "<user>", "<assistant>", *CHARACTERS]
CHAT_TEMPLATE = (
    "<bos>{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def bench(tmp_path: Path, tokenizer_folder: str) -> Bench:
    return Bench(tmp_path, tokenizer_folder)


MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
WriteJsonl = Callable[..., str]


@pytest.fixture
def make_tokenizer() -> MakeTokenizer:
    """`template` frames a text ("<bos> $A <eos>"); `chat_template` may be None."""

    def make(template: str = "$A", chat_template: str | None = CHAT_TEMPLATE) -> Any:
        ids = {token: i for i, token in enumerate(TOKENS)}
        core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        special = [(token, ids[token]) for token in TOKENS[:5]]
        core.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core,
            unk_token="<unk>",
            bos_token="<bos>",
            eos_token="<eos>",
            additional_special_tokens=["<user>", "<assistant>"],
        )
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture
def ids_of() -> Callable[..., list[int]]:
    """The ids of tokens, given one by one or as characters of a string."""

    def ids(*parts: str) -> list[int]:
        return [TOKENS.index(t) for part in parts for t in ([part] if part in TOKENS else part)]

    return ids


@pytest.fixture
def write_jsonl(tmp_path: Path) -> WriteJsonl:
    """Writes rows (objects, or raw lines as str or bytes) and returns the file's name."""

    def write(*rows: Any, name: str = "train.jsonl") -> str:
        file = tmp_path / name
        lines = [row if isinstance(row, (str, bytes)) else json.dumps(row) for row in rows]
        raw = [line.encode() if isinstance(line, str) else line for line in lines]
        file.write_bytes(b"".join(line + b"\n" for line in raw))
        return str(file)

    return write
