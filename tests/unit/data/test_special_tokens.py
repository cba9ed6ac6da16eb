"""Special tokens that users spell, and tokens beside special ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mindspeed_rlxf.agents.conversation import ChatTemplate
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.prompts import load_prompts
from mindspeed_rlxf.data.templates import PromptEncoder, Turn
from mindspeed_rlxf.data.tokenizer import SpecialTokens

MARKS = ("<s>", "<|user|>", "<|end|>")
TEMPLATE = "<s>{% for m in messages %}<|user|>\n{{ m.content }} <|end|>\n{% endfor %}"


def stripping() -> Tokenizer:
    """Its special tokens strip white space around them, as those of Phi."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(mark, lstrip=True, rstrip=True, normalized=False) for mark in MARKS]
    )
    return core


def metaspace(scheme: str) -> Tokenizer:
    """It begins a text, or every part of one, with a blank, as those of Llama and Mistral."""
    letters = [*MARKS, "<unk>", "▁", *map(chr, range(33, 127)), "\n"]
    core = Tokenizer(models.BPE({t: i for i, t in enumerate(letters)}, [], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return core


MAKERS = {
    "stripping": stripping,
    "first": lambda: metaspace("first"),
    "always": lambda: metaspace("always"),
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    core = MAKERS[name]()
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ids_of_prompt(folder: Path, tokenizer: Any, prompt: Any, **keys: Any) -> list[int]:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"prompt": prompt, "ground_truth": "", "data_source": "a"}))
    (loaded,) = load_prompts(str(file), tokenizer, DataConfig(train_files=[str(file)], **keys), 99)
    return [int(i) for i in loaded.token_ids]


@pytest.mark.parametrize("name", [*MAKERS])
def test_a_spelled_token_is_text_and_changes_nothing_beside_it(tmp_path: Path, name: str) -> None:
    """The text differs from one without a token in a single letter, and so do the ids."""
    tokenizer = tokenizer_of(name)

    def ids_of(content: str) -> list[int]:
        return ids_of_prompt(tmp_path, tokenizer, [{"role": "user", "content": content}])

    spelled, plain = ids_of("a <|end|> b"), ids_of("a <|enx|> b")
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "dx"]
    assert [pair for pair in zip(spelled, plain, strict=True) if pair[0] != pair[1]] == [
        tuple(letters)
    ]


def test_deepseeks_marks_of_roles_are_text_in_chats_and_tokens_elsewhere(tmp_path: Path) -> None:
    mark = "<\uff5cUser\uff5c>"
    tokenizer = tokenizer_of("first")
    tokenizer.add_tokens([AddedToken(mark), AddedToken("<|fim|>")])
    tokenizer.chat_template = f"{mark}{TEMPLATE}"
    mark_id, fim_id = tokenizer.convert_tokens_to_ids([mark, "<|fim|>"])
    ids = ids_of_prompt(tmp_path, tokenizer, [{"role": "user", "content": f"<|fim|>a {mark}"}])
    assert (ids.count(mark_id), ids.count(fim_id)) == (1, 1) and ids[0] == mark_id
    observed = ChatTemplate(tokenizer, [0]).text_ids([{"role": "user", "content": f"a{mark}"}])
    assert observed[-1] == ids_of_prompt(tmp_path, tokenizer, f"a{mark}")[-1] == mark_id


@pytest.mark.parametrize("name", [*MAKERS])
def test_a_text_with_a_bos_of_its_own_gets_no_second_one(tmp_path: Path, name: str) -> None:
    tokenizer = tokenizer_of(name)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    expected = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    ids = ids_of_prompt(tmp_path, tokenizer, rendered, allow_special_tokens=True)
    assert ids == expected and ids.count(tokenizer.bos_token_id) == 1
    encoder = PromptEncoder(tokenizer, "empty", allow_special_tokens=True)
    assert encoder.encode([[Turn("user", rendered)]]) == [expected]
    assert ids_of_prompt(tmp_path, tokenizer, "hi") == tokenizer("hi")["input_ids"]
    spelled = ids_of_prompt(tmp_path, tokenizer, "<s>hi")
    assert spelled.count(tokenizer.bos_token_id) == 1 and len(spelled) >= 6


def test_words_added_behind_a_vocabulary_with_special_tokens_keep_their_ids() -> None:
    tokenizer = tokenizer_of("first")
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<b>")])
    text = "<s><|user|>\na <think> b <b><|end|>"
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert SpecialTokens(tokenizer).token_ids(text) == expected
