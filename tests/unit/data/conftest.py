"""A small tokenizer with one id per character, a folder with a byte tokenizer, and prompt files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.unit.data.bench import Bench, write_rows
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
    """Return a function that makes a tokenizer.

    template:      special tokens around a text, such as "<bos> $A <eos>"
    chat_template: None = no chat template
    """

    def make(template: str = "$A", chat_template: str | None = CHAT_TEMPLATE) -> Any:
        ids = {token: i for i, token in enumerate(TOKENS)}
        core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        special = [(token, ids[token]) for token in TOKENS[:5]]
        core.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>",
            additional_special_tokens=["<user>", "<assistant>"],
        )  # fmt: skip
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture
def ids_of() -> Callable[..., list[int]]:
    """Return a function that gives the ids of its arguments: tokens, or texts by character."""

    def ids(*parts: str) -> list[int]:
        return [TOKENS.index(t) for part in parts for t in ([part] if part in TOKENS else part)]

    return ids


@pytest.fixture
def write_jsonl(tmp_path: Path) -> WriteJsonl:
    """Return `write_rows` to a file of the test's folder, `train.jsonl` unless it is named."""
    return lambda *rows, name="train.jsonl": write_rows(tmp_path / name, *rows)
