"""Each handler writes the columns of its table, and every row it cannot use is counted."""

import json
from typing import Any

import pytest

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.handlers import HANDLERS, parse_map_keys
from mindspeed_rlxf.data.indexed_prompts import load_indexed_prompts
from mindspeed_rlxf.data.preprocessing.pipeline import Counts
from tests.unit.data.bench import Bench
from tests.unit.data.byte_tokenizer import byte_tokenizer

USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def run(bench: Bench, handler: str, rows: list[Any], keys: str = "{}", **options: Any) -> Counts:
    map_keys = parse_map_keys(keys, HANDLERS[handler])
    values = {"template": "chatml", "overwrite": True, **options}
    file = bench.write("rows.jsonl", *rows)
    return bench.run(file, handler=handler, map_keys=map_keys, **values)


def reasons(bench: Bench) -> list[tuple[int, str]]:
    return [(row["row"], row["reason"]) for row in bench.rejected()]


def prompts(bench: Bench, **keys: Any) -> list[tuple[str, str]]:
    data = DataConfig(data_path=[str(bench.prefix)], default_data_source="x", **keys)
    found = load_indexed_prompts([str(bench.prefix)], byte_tokenizer(), data, 500)
    return [(prompt.text, prompt.ground_truth) for prompt in found.prompts]


def talk(*texts: str, first: str = "human") -> list[dict[str, str]]:
    roles = ("human", "gpt") if first == "human" else ("gpt", "human")
    return [{"from": roles[i % 2], "value": text} for i, text in enumerate(texts)]


def test_the_last_response_of_a_conversation_is_the_answer(bench: Bench) -> None:
    rows = [{"conversations": [{"from": "system", "value": "S"}, *talk("A", "B", "C", "D")]}]
    run(bench, "R1SharegptStyleInstructionHandler", rows)
    history = f"<|im_start|>system\nS<|im_end|>\n{USER.format('A')}B<|im_end|>\n"
    assert prompts(bench, ground_truth_key="labels") == [(f"{history}{USER.format('C')}", "D")]


@pytest.mark.parametrize(
    ("row", "keys", "answer"),
    [
        ({"q": "1+1", "a": "two<|im_end|>"}, {"prompt": "q", "response": "a"}, "two<|im_end|>"),
        ({"instruction": "1+1", "output": 2}, {}, "2"),
        ({"talk": talk("1+1", "two<|im_end|>")}, {"messages": "talk"}, "two<|im_end|>"),
    ],
)
def test_the_answer_is_a_column_that_rewards_can_compare_with(
    row: dict[str, Any], keys: dict[str, str], answer: str, bench: Bench
) -> None:
    style = "Sharegpt" if "messages" in keys else "Alpaca"
    run(bench, f"R1{style}StyleInstructionHandler", [row], json.dumps(keys))
    assert bench.column("labels") == [answer]
    assert prompts(bench, ground_truth_key="labels") == [(USER.format("1+1"), answer)]


def test_only_the_named_columns_are_kept(bench: Bench) -> None:
    rows = [{"instruction": "A", "output": "B", "level": 3, "note": "n"}]
    run(bench, "R1AlpacaStyleInstructionHandler", rows, additional_columns=("labels", "level"))
    assert [c.name for c in bench.sidecar().columns if c.encoding == "json"] == ["level", "labels"]
    with pytest.raises(UserError, match=r"no row has 'levle' .*did you mean level\?"):
        run(bench, "R1AlpacaStyleInstructionHandler", rows, additional_columns=("levle",))


def test_a_second_labels_column_is_an_error(bench: Bench) -> None:
    rows = [{"instruction": "A", "output": "B", "labels": "other"}]
    with pytest.raises(UserError, match="writes the answers as column 'labels', which"):
        run(bench, "R1AlpacaStyleInstructionHandler", rows)
    run(bench, "R1AlpacaStyleInstructionHandler", rows, '{"response": "labels"}')
    assert bench.column("labels") == ["other"]


SHAREGPT: list[tuple[dict[str, Any], str]] = [
    ({"conversations": talk("A", "B")}, ""),
    ({"conversations": talk("A", "B", "C")}, "wrong roles"),
    ({"conversations": talk("A", "B", first="gpt")}, "wrong roles"),
    ({"conversations": [*talk("A"), *talk("A", "B")]}, "wrong roles"),
    ({"conversations": [{"from": "bot", "value": "A"}]}, "wrong roles"),
    ({"conversations": [*talk("A", "B"), {"from": "system", "value": "S"}]}, "wrong roles"),
    ({"conversations": []}, "wrong type"),
    ({"conversations": "A"}, "wrong type"),
    ({"conversations": [{"from": "human"}, *talk("B", first="gpt")]}, "wrong type"),
    ({"conversations": [*talk("A"), {"from": "function_call", "value": "{}"}]}, "tool turns"),
    ({"text": "A"}, "no messages"),
    ({"conversations": talk("A\ud800", "B")}, "invalid unicode"),
    ({"conversations": talk(" ", "B")}, "empty prompt"),
]


ALPACA: list[tuple[dict[str, Any], str]] = [
    ({"output": "B"}, ""), ({}, "no response"), ({"output": None}, "no response"),
    ({"output": {}}, "wrong type"), ({"output": True}, "wrong type"),
    ({"output": "\ud800"}, "invalid unicode"), ({"output": " "}, "empty response"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("style", "rows", "common"),
    [("Sharegpt", SHAREGPT, {}), ("Alpaca", ALPACA, {"instruction": "A"})],
)
def test_unusable_rows_are_counted_by_reason(
    style: str, rows: list[tuple[dict[str, Any], str]], common: dict[str, Any], bench: Bench
) -> None:
    given = [common | row for row, _ in rows]
    counts = run(bench, f"R1{style}StyleInstructionHandler", given)
    assert reasons(bench) == [(i, why) for i, (_, why) in enumerate(rows, start=1) if why]
    assert (counts.rows_written, counts.dropped.total()) == (1, len(rows) - 1)


def test_tags_name_the_keys_and_roles_of_messages(bench: Bench) -> None:
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
    keys = {"messages": "m", "tags": {**tags, "assistant_tag": "assistant"}, "tools": ""}
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    run(bench, "R1SharegptStyleInstructionHandler", [{"m": messages}], json.dumps(keys))
    assert bench.column("labels") == ["B"]
