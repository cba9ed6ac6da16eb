"""Raw rows of the four data sets become prompts with the answers that their rules compare."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import full_hh_rlhf
import gsm8k
import hellaswag
import math_dataset
import preparation
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.prompts import Prompt, load_prompts
from mindspeed_rlxf.rewards import rules, verifiers
from tests import raw_rows
from tests.unit.data.byte_tokenizer import byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
WRITE: dict[ModuleType, Callable[[Path], Path]] = {
    gsm8k: raw_rows.write_gsm8k,
    math_dataset: raw_rows.write_math,
    hellaswag: raw_rows.write_hellaswag,
    full_hh_rlhf: raw_rows.write_hh,
}


def prepared(script: ModuleType, folder: Path) -> Path:
    """The folder of the parquet files, made from raw rows."""
    raw, out = WRITE[script](folder / "raw"), folder / "out"
    assert script.main(["--input", str(raw), "--output", str(out)]) == 0
    return out


def prompts_of(file: Path) -> list[Prompt]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    data = DataConfig(train_files=[str(file)], ground_truth_key="reward_model.ground_truth")
    return list(load_prompts(str(file), tokenizer, data, 1024))


def rows_of(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows


def test_gsm8k_becomes_prompts_whose_rule_knows_the_answer(tmp_path: Path) -> None:
    out = prepared(gsm8k, tmp_path)
    prompts = prompts_of(out / "train.parquet")
    assert [p.ground_truth for p in prompts] == ["2", "4", "6", "5", "3", "5", "4", "1000"]
    assert prompts[0].text == (
        "<|im_start|>user\nAda has 1 apples and finds 1. How many are there?\n\n"
        f"{gsm8k.INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    rule = rules.RULES[rules.BUILTIN_SOURCES[prompts[0].data_source]]
    assert rule("so #### 1,000", prompts[-1].ground_truth).score == 1.0
    assert rule("so #### 7", prompts[-1].ground_truth).score == 0.0
    assert len(prompts_of(out / "test.parquet")) == 8


def test_math_takes_the_last_box_of_the_solution(tmp_path: Path) -> None:
    prompts = prompts_of(prepared(math_dataset, tmp_path) / "test.parquet")
    assert [p.ground_truth for p in prompts[-2:]] == ["\\frac{1}{3}", "7"]
    assert {p.data_source for p in prompts} == {"DigitalLearningGmbH/MATH-lighteval"}
    assert "Compute $9 - 1$.\n\nReason step by step and put the final answer in \\boxed{}" in (
        prompts[0].text
    )
    assert verifiers.accuracy("\\boxed{\\frac13}", prompts[-2].ground_truth) == 1.0
    assert verifiers.accuracy("\\boxed{3}", prompts[-2].ground_truth) < 1.0


def test_hellaswag_lists_the_endings_and_asks_for_a_letter(tmp_path: Path) -> None:
    out = prepared(hellaswag, tmp_path)
    prompts = prompts_of(out / "train.parquet")
    assert [p.ground_truth for p in prompts] == [*"ABCDABCD"]
    assert (
        "user\nPicking apples: In the garden. Ben climbs a ladder. The apples are red and she\n\n"
        "A. eats the door.\nB. puts them in a basket.\nC. sings to the lamp.\nD. paints the lake.\n"
    ) in prompts[1].text
    assert rules.exact_match("B", prompts[1].ground_truth).score == 1.0
    assert rules.exact_match("C", prompts[1].ground_truth).score == 0.0
    assert len(prompts_of(out / "test.parquet")) == 4  # the validation split, which has labels


def test_hh_rlhf_becomes_prompts_for_a_reward_model_and_pairs(tmp_path: Path) -> None:
    out = prepared(full_hh_rlhf, tmp_path)
    prompts = prompts_of(out / "rl" / "train.parquet")
    assert len(prompts) == 16 and {p.ground_truth for p in prompts} == {""}
    assert prompts[1].text == (
        "<|im_start|>user\nHi, I am Ben.<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nCan you count to 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    pairs = rows_of(out / "rm" / "test.parquet")
    assert pairs[0] == {
        "data_source": "Dahoas/full-hh-rlhf",
        "prompt": [{"role": "user", "content": "Can you count to 1?"}],
        "chosen": "Yes, gladly!",
        "rejected": "No. Go away.",
        "extra_info": {"split": "test", "index": 0},
    }


@pytest.mark.parametrize("script", WRITE, ids=lambda script: script.__name__)
def test_every_row_has_the_columns_of_training_and_its_place(
    script: ModuleType, tmp_path: Path
) -> None:
    out = prepared(script, tmp_path)
    file = out / ("rl/test.parquet" if script is full_hh_rlhf else "test.parquet")
    rows = rows_of(file)
    assert all(list(row) == COLUMNS for row in rows)
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
    assert {row["extra_info"]["split"] for row in rows} == {"test"}
    style = "model" if script is full_hh_rlhf else "rule"
    assert {row["reward_model"]["style"] for row in rows} == {style}


def test_the_files_of_the_hub_are_read_too(tmp_path: Path) -> None:
    folder = tmp_path / "raw" / "main"
    folder.mkdir(parents=True)
    for part, rows in enumerate((raw_rows.gsm8k_rows()[:3], raw_rows.gsm8k_rows()[3:])):
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, folder / f"train-0000{part}-of-00002.parquet")
    raw, out = str(tmp_path / "raw"), str(tmp_path / "out")
    assert gsm8k.main(["--input", raw, "--output", out, "--instruction", ""]) == 0
    prompts = prompts_of(tmp_path / "out" / "train.parquet")
    assert [p.ground_truth for p in prompts][-2:] == ["4", "1000"]
    assert "####" not in prompts[0].text


@pytest.mark.parametrize(
    ("make_row", "raw", "reason"),
    [
        (gsm8k.make_row, {"question": "1+1?", "answer": "two"}, "no answer after ####"),
        (math_dataset.make_row, {"problem": "?", "solution": "7"}, "no answer in \\boxed{}"),
        (hellaswag.make_row, {**raw_rows.hellaswag_rows()[0], "label": 4}, "no label"),
        (hellaswag.make_row, {**raw_rows.hellaswag_rows()[0], "endings": ["a"]}, "not 4 endings"),
        (full_hh_rlhf.make_pair_row, {"chosen": "\n\nHuman: a\n\nAssistant: b",
         "rejected": "\n\nHuman: c\n\nAssistant: d"},
         "the dialogues differ before their last turn"),
        (full_hh_rlhf.make_prompt_row, dict.fromkeys(("chosen", "rejected"),
         "\n\nHuman: a\n\nHuman: b\n\nAssistant: c"), "Human and Assistant do not take turns"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_used_has_a_reason(
    make_row: preparation.MakeRow, raw: dict[str, Any], reason: str
) -> None:
    with pytest.raises(preparation.Unusable) as caught:
        make_row(raw, "train", 0)
    assert str(caught.value) == reason


def test_rows_left_out_are_counted_by_reason_and_keep_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"question": "1+1?", "answer": "#### 2"}
    lines = [{"question": "a"}, good, {"question": "b"}, {"question": "c", "answer": "d"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "train.jsonl").write_text(text, encoding="utf-8")
    assert gsm8k.main(["--input", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    output = capsys.readouterr()
    assert "train.parquet: 1 rows\n" in output.out
    assert "  left out, no text in 'answer': 2\n  left out, no answer after ####: 1" in output.out
    assert output.err == f"note: {tmp_path} has no file of the split 'test'\n"
    (row,) = rows_of(tmp_path / "out" / "train.parquet")
    assert row["extra_info"] == {"split": "train", "index": 1}


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("train.jsonl", b"{broken\n", "train.jsonl:1 must be whole: "),
        ("train.jsonl", b'{"question": "a"}\n', "train.parquet must hold at least one row"),
        ("train.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:20],
         "train.jsonl.gz must be whole: cannot"),
        ("other.txt", b"", "must hold one of: train.jsonl, train.jsonl.gz"),
    ],
)  # fmt: skip
def test_a_broken_data_set_is_an_error_and_leaves_no_file(
    name: str, content: bytes, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    (raw / name).write_bytes(content)
    assert gsm8k.main(["--input", str(raw), "--output", str(out)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and error in lines[0]
    assert not list(out.rglob("*.parquet*"))


def test_a_name_is_loaded_by_the_library_if_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--input", "openai/gsm8k", "--output", str(tmp_path)]
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    assert gsm8k.main(arguments) == 2
    assert "error: --input=openai/gsm8k must be a folder: the package `datasets` is not" in (
        capsys.readouterr().err
    )
    library: Any = ModuleType("datasets")
    asked = []

    def load_dataset(name: str, config: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return raw_rows.gsm8k_rows()

    library.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert gsm8k.main(arguments) == 0
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert len(prompts_of(tmp_path / "train.parquet")) == 8
    assert gsm8k.main(["--input", "openai/gsm", "--output", str(tmp_path)]) == 2
