"""Keys of `data` that say how rows become prompts: templates, other columns, cuts, bad rows."""

import datetime
import logging
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.prompts import load_prompts
from tests.unit.data.conftest import MakeTokenizer, WriteJsonl

THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}no thoughts{% endif %}"
)
CHAT = [{"role": "user", "content": "hi", "tool": None}]


def data(**keys: Any) -> DataConfig:
    return DataConfig(**{"train_files": ["unused"], "default_data_source": "a", **keys})


def first_problem(file: str, tokenizer: Any, config: DataConfig) -> str:
    with pytest.raises(UserError) as caught:
        load_prompts(file, tokenizer, config, 100)
    return str(caught.value.problems[0]).removeprefix(f"{file}:")


def test_rows_of_the_usual_columns_are_read_from_parquet(
    make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    row = {
        "source": {"name": "sums"},
        "question": CHAT,
        "ability": "math",
        "reward_model": {"style": "rule", "truth": {"text": "4"}},
        "extra_info": {"split": "train", "index": 7, "choices": ["a", "b"]},
    }
    file = tmp_path / "rows.parquet"
    second = {**row, "extra_info": None, "source": {"name": "others"}}
    pq.write_table(pa.Table.from_pylist([row, second]), file)
    keys = {"ground_truth_key": "reward_model.truth.text", "data_source_key": "source.name"}
    config = data(prompt_key="question", **keys)
    prompt, other = load_prompts(str(file), make_tokenizer(), config, 100)
    assert prompt.text == "<bos><user>hi<assistant>"
    assert (prompt.ground_truth, prompt.data_source) == ("4", "sums")
    assert other.data_source == "others"
    columns = {"source": {"name": "sums"}, "ability": "math", "reward_model": row["reward_model"]}
    assert prompt.extra_info == {**columns, "split": "train", "index": 7, "choices": ["a", "b"]}
    assert other.extra_info == {**columns, "source": {"name": "others"}}
    config = data(prompt_key="question", extra_columns=["extra_info", "reward_model.style"])
    prompt, other = load_prompts(str(file), make_tokenizer(), config, 100)
    style = {"reward_model": {"style": "rule"}}  # kept in any case: it chooses what scores the row
    assert other.extra_info == {"reward_model.style": "rule", **style}
    assert prompt.extra_info == {**row["extra_info"], **other.extra_info}  # type: ignore[dict-item]


def test_whole_numbers_are_integers_and_nan_is_null(
    make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    """As pandas writes a column of integers in which some are missing."""
    file = tmp_path / "rows.parquet"
    truths = [18.0, 0.5, float("nan"), 1e21]
    rows = [{"prompt": "a", "ground_truth": truth, "n": {"x": truth}} for truth in truths]
    pq.write_table(pa.Table.from_pylist(rows), file)
    prompts = load_prompts(str(file), make_tokenizer(), data(), 9)
    assert [p.ground_truth for p in prompts] == ["18", "0.5", "", "1" + "0" * 21]
    assert [p.extra_info["n"]["x"] for p in prompts] == [18.0, 0.5, None, 1e21]


def test_values_that_json_lacks_become_text(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    file, value = tmp_path / "rows.parquet", [datetime.date(2024, 2, 3)]
    row = {"prompt": "a", "x": {"y": value}, "b": b"\x00", "z": math.inf}
    pq.write_table(pa.Table.from_pylist([row]), file)
    expected = {"x": {"y": ["2024-02-03"]}, "b": "AA==", "z": math.inf}
    for columns, found in ((None, expected), (["b"], {"b": "AA=="}), ([], {})):
        (prompt,) = load_prompts(str(file), make_tokenizer(), data(extra_columns=columns), 100)
        assert prompt.extra_info == found


def test_a_named_column_that_no_row_has_is_warned_of(
    make_tokenizer: MakeTokenizer, write_jsonl: WriteJsonl, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a", "ground_truth": "1", "x": n} for n in (None, 2)]
    file = str(write_jsonl(*rows))
    keys = data(default_data_source="t", extra_columns=["x", "y"])
    assert [p.extra_info for p in load_prompts(file, make_tokenizer(), keys, 100)] == [{}, {"x": 2}]
    assert f"{file}: no row has data.extra_columns=['y']" in caplog.text


def test_chat_template_kwargs_reach_the_template(
    make_tokenizer: MakeTokenizer, write_jsonl: WriteJsonl
) -> None:
    file, tokenizer = write_jsonl({"prompt": CHAT}), make_tokenizer(chat_template=THINKING)
    for keys, text in (
        ({}, "<user>hi<assistant>"),
        ({"enable_thinking": True}, "<user>hi<assistant>"),
        ({"enable_thinking": False}, "<user>hi<assistant>no thoughts"),
    ):
        (prompt,) = load_prompts(file, tokenizer, data(chat_template_kwargs=keys), 100)
        assert prompt.text == text


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "messages"])
def test_chat_template_kwargs_leave_the_run_its_own(name: str) -> None:
    with pytest.raises(ValidationError, match=f"no {name}"):
        data(chat_template_kwargs={name: True, "enable_thinking": False})


def test_a_system_prompt_comes_first_unless_the_chat_has_one(
    make_tokenizer: MakeTokenizer, write_jsonl: WriteJsonl
) -> None:
    own = [{"role": "system", "content": "own"}, *CHAT]
    file = write_jsonl({"prompt": CHAT}, {"prompt": own})
    prompts = load_prompts(file, make_tokenizer(), data(system_prompt="be brief"), 100)
    assert [p.text for p in prompts] == [
        "<bos><system>be brief<user>hi<assistant>",
        "<bos><system>own<user>hi<assistant>",
    ]
    file = write_jsonl({"prompt": "text"})
    assert first_problem(file, make_tokenizer(), data(system_prompt="be brief")) == (
        "1: a prompt must be chat messages with data.system_prompt, this one is text; "
        "write it as [{role: user, content: ...}], or remove the key"
    )


@pytest.mark.parametrize(
    ("word", "limit", "kept", "said"),
    [
        ("keep_head", 4, "abcd", "first 4"),
        ("right", 4, "abcd", "first 4"),
        ("keep_tail", 4, "wxyz", "last 4"),
        ("left", 4, "wxyz", "last 4"),
        ("keep_ends", 4, "abyz", "first and last 4"),
        ("middle", 5, "abxyz", "first and last 5"),
        ("middle", 1, "z", "first and last 1"),
    ],
)
def test_long_prompts_are_cut_on_the_named_side(
    word: str, limit: int, kept: str, said: str, make_tokenizer: MakeTokenizer,
    write_jsonl: WriteJsonl, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    text = "abcdefghijklmnopqrstuvwxyz"
    file = write_jsonl({"prompt": text}, {"prompt": "1" * 9999}, {"prompt": "1"})
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(file, make_tokenizer(), data(overlong_prompts=word), limit)
    texts = [p.text.replace(" ", "") for p in prompts]  # decoded character by character
    assert texts == [kept, "1" * limit, "1"]
    assert f"2 of 3 prompts are over {limit} tokens and truncated to their {said}" in caplog.text


def test_invalid_rows_are_dropped_and_counted_on_request(
    make_tokenizer: MakeTokenizer, write_jsonl: WriteJsonl, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_jsonl({"prompt": 5, "ground_truth": []}, {"prompt": "a"}, "{", {"prompt": 5})
    config = data(invalid_rows="drop")
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(file, make_tokenizer(), config, 100)
    assert [(p.index, p.text) for p in prompts] == [(0, "a")]
    assert f"{file}: 3 rows dropped (data.invalid_rows=drop)" in caplog.text
    assert "dropped: " + file + ":1: a prompt must be text or a list" in caplog.text
