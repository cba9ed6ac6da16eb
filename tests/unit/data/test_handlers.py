"""Each handler writes the columns of its table, and every row it cannot use is counted."""

import json
from typing import Any

import pytest

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.handlers import HANDLERS, parse_map_keys
from mindspeed_rlxf.data.indexed_prompts import load_indexed_prompts
from mindspeed_rlxf.data.preprocessing.pipeline import Counts
from mindspeed_rlxf.data.sidecar import column_files
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


@pytest.mark.parametrize(
    ("handler", "row"),
    [
        ("AlpacaStyleInstructionHandler", {"instruction": "A", "input": "B", "output": "C"}),
        ("LlamaFactoryInstructionHandler", {"instruction": "A\nB", "output": ["C"]}),
        ("SharegptStyleInstructionHandler", {"conversations": talk("A\nB", "C")}),
    ],
)
def test_an_instruction_has_labels_on_its_response(
    handler: str, row: dict[str, Any], bench: Bench
) -> None:
    run(bench, handler, [row])
    assert bench.texts("input_ids") == [USER.format("A\nB") + "C<|im_end|>"]
    assert bench.texts("labels") == ["C<|im_end|>"]
    mask, labels = (bench.sequences(c)[0].tolist() for c in ("attention_mask", "labels"))
    assert mask == [1] * len(labels) and labels.count(-100) == len(labels) - 2
    assert prompts(bench) == [(USER.format("A\nB"), "")]


def test_every_response_of_a_conversation_is_labelled_and_the_prompt_is_before_the_last(
    bench: Bench,
) -> None:
    rows = [{"conversations": [{"from": "system", "value": "S"}, *talk("A", "B", "C", "D")]}]
    run(bench, "SharegptStyleInstructionHandler", rows)
    assert bench.texts("labels") == ["B<|im_end|>D<|im_end|>"]
    system = "<|im_start|>system\nS<|im_end|>\n"
    history = f"{system}{USER.format('A')}B<|im_end|>\n{USER.format('C')}"
    assert prompts(bench) == [(history, "")]


def test_append_eod_ends_a_conversation_with_one_eos(bench: Bench) -> None:
    rows = [{"instruction": "A", "output": "B"}]
    for template, text in (("chatml", "B<|im_end|><|end_of_text|>"), ("empty", "B<|end_of_text|>")):
        run(bench, "AlpacaStyleInstructionHandler", rows, template=template, append_eod=True)
        assert bench.texts("labels") == [text]


@pytest.mark.parametrize(
    ("handler", "row"),
    [
        (
            "AlpacaStylePairwiseHandler",
            {"instruction": "C", "h": [["A", "B"]], "chosen": "good", "rejected": ""},
        ),
        (
            "AlpacaStylePairwiseHandler",
            {
                "instruction": "C",
                "h": [["A", "B"]],
                "chosen": [{"role": "assistant", "content": "good"}],
                "rejected": [
                    {"role": "user", "content": "A"},
                    {"role": "assistant", "content": "B"},
                    {"role": "user", "content": "C"},
                    {"role": "assistant", "content": ""},
                ],
            },
        ),
        (
            "SharegptStylePairwiseHandler",
            {
                "conversations": talk("A", "B", "C"),
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": ""},
            },
        ),
    ],
)
def test_a_pair_has_both_responses_with_labels_on_them_alone(
    handler: str, row: dict[str, Any], bench: Bench
) -> None:
    run(bench, handler, [row], '{"history": "h"}' if "h" in row else "{}")
    prompt = f"{USER.format('A')}B<|im_end|>\n{USER.format('C')}"
    assert bench.texts("chosen_input_ids") == [f"{prompt}good<|im_end|>"]
    assert bench.texts("rejected_input_ids") == [f"{prompt}<|im_end|>"]
    assert bench.texts("chosen_labels") == ["good<|im_end|>"]
    assert bench.texts("rejected_labels") == ["<|im_end|>"]
    assert "attention_mask" not in column_files(bench.prefix)
    assert prompts(bench) == [(prompt, "")]


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


SHAREGPT_ROWS: list[tuple[dict[str, Any], str]] = [
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


def test_unusable_sharegpt_rows_are_counted_by_reason(bench: Bench) -> None:
    rows = [{"conversations": talk("A", "B")}, *(row for row, _ in SHAREGPT_ROWS)]
    counts = run(bench, "SharegptStyleInstructionHandler", rows)
    assert reasons(bench) == [(i + 2, reason) for i, (_, reason) in enumerate(SHAREGPT_ROWS)]
    assert (counts.rows_written, counts.dropped.total()) == (1, len(SHAREGPT_ROWS))


@pytest.mark.parametrize(
    ("handler", "good", "bad"),
    [
        (
            "AlpacaStyleInstructionHandler",
            {"output": "B"},
            [({}, "no response"), ({"output": None}, "no response"), ({"output": {}}, "wrong type"),
             ({"output": ["a", "b"]}, "wrong type"), ({"output": "\ud800"}, "invalid unicode")],
        ),
        ("R1AlpacaStyleInstructionHandler", {"output": "B"}, [({"output": " "}, "empty response")]),
        (
            "AlpacaStylePairwiseHandler",
            {"chosen": "B", "rejected": "C"},
            [({"chosen": "B"}, "no response"),
             ({"chosen": "B", "rejected": [{"role": "user", "content": "A"}]}, "wrong roles"),
             ({"chosen": "B", "rejected": [{"role": "user", "content": "Z"},
                                           {"role": "assistant", "content": "C"}]},
              "another prompt")],
        ),
    ],
)  # fmt: skip
def test_unusable_responses_are_counted_by_reason(
    handler: str, good: dict[str, Any], bad: list[tuple[dict[str, Any], str]], bench: Bench
) -> None:
    rows = [{"instruction": "A", **values} for values in (good, *(values for values, _ in bad))]
    counts = run(bench, handler, rows)
    assert reasons(bench) == [(i + 2, reason) for i, (_, reason) in enumerate(bad)]
    assert counts.rows_written == 1


def test_tags_name_the_keys_and_roles_of_messages(bench: Bench) -> None:
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
    keys = {"messages": "m", "tags": {**tags, "assistant_tag": "assistant"}, "tools": ""}
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    run(bench, "SharegptStyleInstructionHandler", [{"m": messages}], json.dumps(keys))
    assert bench.texts("labels") == ["B<|im_end|>"]
