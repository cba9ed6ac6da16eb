"""Each handler writes the columns of its table, and every row it cannot use is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.handlers import HANDLERS
from mindspeed_rlxf.data.indexed import IndexedReader
from mindspeed_rlxf.data.indexed_prompts import load_indexed_prompts
from mindspeed_rlxf.data.preprocessing.map_keys import parse_map_keys
from mindspeed_rlxf.data.preprocessing.pipeline import PreprocessOptions, preprocess
from mindspeed_rlxf.data.preprocessing.row_source import Counts
from mindspeed_rlxf.data.sidecar import column_files, data_path, read_sidecar
from tests.unit.data.byte_tokenizer import byte_tokenizer, write_tokenizer

USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Bench:
    def __init__(self, folder: Path, tokenizer: str) -> None:
        self.folder, self._tokenizer = folder, tokenizer
        self.prefix = folder / "set"

    def run(self, handler: str, rows: list[Any], keys: str = "{}", **options: Any) -> Counts:
        file = self.folder / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        values = {"template": "chatml", "overwrite": True, **options}
        map_keys = parse_map_keys(keys, HANDLERS[handler])
        inputs, prefix = (str(file),), str(self.prefix)
        return preprocess(
            PreprocessOptions(
                inputs, prefix, self._tokenizer, handler=handler, map_keys=map_keys, **values
            )
        )

    def texts(self, column: str) -> list[str]:
        """Of token ids, or of labels without those that are ignored."""
        reader = IndexedReader(data_path(self.prefix, column))
        rows = [[i for i in reader[place].tolist() if i >= 0] for place in range(len(reader))]
        return [byte_tokenizer().decode(ids) for ids in rows]

    def values(self, column: str) -> list[Any]:
        reader = IndexedReader(data_path(self.prefix, column))
        return [json.loads(reader[place].tobytes()) for place in range(len(reader))]

    def rejected(self) -> list[tuple[int, str]]:
        lines = Path(f"{self.prefix}_rejected.jsonl").read_text(encoding="utf-8").splitlines()
        return [(row["row"], row["reason"]) for row in map(json.loads, lines)]

    def prompts(self, **keys: Any) -> list[tuple[str, str]]:
        data = DataConfig(data_path=[str(self.prefix)], default_data_source="x", **keys)
        found = load_indexed_prompts([str(self.prefix)], byte_tokenizer(), data, 500)
        return [(prompt.text, prompt.ground_truth) for prompt in found.prompts]


@pytest.fixture
def bench(tmp_path: Path, tokenizer_folder: str) -> Bench:
    return Bench(tmp_path, tokenizer_folder)


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
    bench.run(handler, [row])
    assert bench.texts("input_ids") == [USER.format("A\nB") + "C<|im_end|>"]
    assert bench.texts("labels") == ["C<|im_end|>"]
    columns = [IndexedReader(data_path(bench.prefix, c)) for c in ("attention_mask", "labels")]
    mask, labels = (column[0].tolist() for column in columns)
    assert mask == [1] * len(labels) and labels.count(-100) == len(labels) - 2
    assert bench.prompts() == [(USER.format("A\nB"), "")]


def test_every_response_of_a_conversation_is_labelled_and_the_prompt_is_before_the_last(
    bench: Bench,
) -> None:
    rows = [{"conversations": [{"from": "system", "value": "S"}, *talk("A", "B", "C", "D")]}]
    bench.run("SharegptStyleInstructionHandler", rows)
    assert bench.texts("labels") == ["B<|im_end|>D<|im_end|>"]
    system = "<|im_start|>system\nS<|im_end|>\n"
    history = f"{system}{USER.format('A')}B<|im_end|>\n{USER.format('C')}"
    assert bench.prompts() == [(history, "")]


def test_append_eod_ends_a_conversation_with_eos_once(bench: Bench) -> None:
    rows = [{"instruction": "A", "output": "B"}]
    for template, text in (("chatml", "B<|im_end|><|end_of_text|>"), ("empty", "B<|end_of_text|>")):
        bench.run("AlpacaStyleInstructionHandler", rows, template=template, append_eod=True)
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
    bench.run(handler, [row], '{"history": "h"}' if "h" in row else "{}")
    prompt = f"{USER.format('A')}B<|im_end|>\n{USER.format('C')}"
    assert bench.texts("chosen_input_ids") == [f"{prompt}good<|im_end|>"]
    assert bench.texts("rejected_input_ids") == [f"{prompt}<|im_end|>"]
    assert bench.texts("chosen_labels") == ["good<|im_end|>"]
    assert bench.texts("rejected_labels") == ["<|im_end|>"]
    assert "attention_mask" not in column_files(bench.prefix)
    assert bench.prompts() == [(prompt, "")]


@pytest.mark.parametrize(
    ("handler", "row", "keys"),
    [
        ("R1AlpacaStyleInstructionHandler", {"q": "1+1", "a": "two<|im_end|>"}, ("q", "a")),
        (
            "R1SharegptStyleInstructionHandler",
            {"talk": talk("1+1", "two<|im_end|>")},
            ("talk", None),
        ),
    ],
)
def test_the_answer_is_a_column_that_rewards_can_compare_with(
    handler: str, row: dict[str, Any], keys: tuple[str, str | None], bench: Bench
) -> None:
    named = {"prompt": keys[0], "response": keys[1]} if keys[1] else {"messages": keys[0]}
    bench.run(handler, [row], json.dumps(named))
    assert bench.values("labels") == ["two<|im_end|>"]
    assert bench.prompts(ground_truth_key="labels") == [(USER.format("1+1"), "two<|im_end|>")]


def test_a_number_is_an_answer_too(bench: Bench) -> None:
    bench.run("R1AlpacaStyleInstructionHandler", [{"instruction": "1+1", "output": 2}])
    assert bench.values("labels") == ["2"]


def test_without_a_response_prompts_are_written_all_the_same(bench: Bench) -> None:
    rows = [{"instruction": "A"}]
    for handler in ("PPOAlpacaStyleInstructionHandler", "R1AlpacaStyleInstructionHandler"):
        counts = bench.run(handler, rows, '{"response": ""}')
        assert (counts.rows_written, column_files(bench.prefix)) == (
            1,
            ["attention_mask", "input_ids"],
        )


def test_only_the_named_columns_are_kept(bench: Bench) -> None:
    rows = [{"instruction": "A", "output": "B", "level": 3, "note": "n"}]
    bench.run("R1AlpacaStyleInstructionHandler", rows, additional_columns=("labels", "level"))
    sidecar = read_sidecar(bench.prefix)
    assert sidecar is not None
    assert [c.name for c in sidecar.columns if c.encoding == "json"] == ["level", "labels"]
    with pytest.raises(UserError, match=r"no row has 'levle' .*did you mean level\?"):
        bench.run("R1AlpacaStyleInstructionHandler", rows, additional_columns=("levle",))


def test_a_second_labels_column_is_an_error(bench: Bench) -> None:
    rows = [{"instruction": "A", "output": "B", "labels": "other"}]
    with pytest.raises(UserError, match="writes the answers as 'labels', the rows have such"):
        bench.run("R1AlpacaStyleInstructionHandler", rows)
    bench.run("R1AlpacaStyleInstructionHandler", rows, '{"response": "labels"}')
    assert bench.values("labels") == ["other"]


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
    counts = bench.run("SharegptStyleInstructionHandler", rows)
    assert bench.rejected() == [(i + 2, reason) for i, (_, reason) in enumerate(SHAREGPT_ROWS)]
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
    counts = bench.run(handler, rows)
    assert bench.rejected() == [(i + 2, reason) for i, (_, reason) in enumerate(bad)]
    assert counts.rows_written == 1


@pytest.mark.parametrize("handler", ["AlpacaStyleInstructionHandler", "AlpacaStylePairwiseHandler"])
def test_the_longest_sequence_counts_for_the_limit(handler: str, bench: Bench) -> None:
    def row(text: str) -> dict[str, str]:
        return {"instruction": "A", "output": text, "chosen": "B", "rejected": text}

    # empty: A, the response and EOS, so 3 fit and 4 do not.
    counts = bench.run(handler, [row("B"), row("BB")], template="empty", max_prompt_length=3)
    assert (counts.rows_written, counts.dropped["too long"]) == (1, 1)


def test_a_turn_out_of_order_is_refused_in_alpaca_rows(bench: Bench) -> None:
    messages = [{"role": "user", "content": "A"}] * 2
    rows = [{"instruction": messages}, {"instruction": "A"}]
    bench.run("PPOAlpacaStyleInstructionHandler", rows)
    assert bench.rejected() == [(1, "wrong roles")]


def test_the_output_does_not_depend_on_the_number_of_processes(bench: Bench) -> None:
    rows = [{"instruction": "A" * (n % 9 + 1), "chosen": "B", "rejected": "C"} for n in range(1100)]
    written = []
    for workers in (1, 3):
        bench.run("AlpacaStylePairwiseHandler", rows, workers=workers)
        files = sorted(bench.folder.glob("set*"))
        written.append([(file.name, file.read_bytes()) for file in files])
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("handler", "text", "problem"),
    [
        ("SharegptStyleInstructionHandler", '{"mesages": "x"}', "did you mean messages?"),
        ("SharegptStyleInstructionHandler", '{"tags": {"user": "x"}}', "did you mean user_tag?"),
        ("SharegptStyleInstructionHandler", '{"tags": {"user_tag": 1}}', "must be a word"),
        ("SharegptStyleInstructionHandler", '{"tools": "tools"}', "descriptions of tools are not"),
        ("SharegptStyleInstructionHandler", '{"kto_tag": "k"}', "single judged responses"),
        ("SharegptStyleInstructionHandler", '{"messages": ""}', "messages must name a column"),
        ("AlpacaStylePairwiseHandler", '{"rejected": ""}', "rejected must name a column for"),
        ("R1AlpacaStyleInstructionHandler", '{"prompt": "p", "response": "p"}', "both are 'p'"),
    ],
)
def test_wrong_map_keys_are_named(handler: str, text: str, problem: str) -> None:
    with pytest.raises(UserError) as error:
        parse_map_keys(text, HANDLERS[handler])
    assert problem in str(error.value)


def test_tags_name_the_keys_and_roles_of_messages(bench: Bench) -> None:
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
    keys = {"messages": "m", "tags": {**tags, "assistant_tag": "assistant"}, "tools": ""}
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    bench.run("SharegptStyleInstructionHandler", [{"m": messages}], json.dumps(keys))
    assert bench.texts("labels") == ["B<|im_end|>"]
