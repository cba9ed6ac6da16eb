"""Rows become prompts, or every problem is named with its file and row."""

import json

import numpy as np
import pytest
from tokenizers import normalizers

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.reward_section import STRUCTURED
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.prompts import load_prompts


def data(**keys):
    return DataConfig(train_files=["unused"], **{"default_data_source": "arithmetic", **keys})


def problems_of(files, tokenizer, config=None, max_prompt_length=100):
    with pytest.raises(UserError) as error:
        load_prompts(files, tokenizer, config or data(), max_prompt_length)
    return list(map(str, error.value.problems))


def test_rows_of_several_files_come_in_order_with_all_fields(make_tokenizer, ids_of, write_jsonl):
    first = write_jsonl(
        {"prompt": "1+1=", "ground_truth": "2", "data_source": "sums"},
        {"prompt": "hi", "ground_truth": 7},
        name="first.jsonl",
    )
    second = write_jsonl({"prompt": "b"}, name="second.jsonl")
    prompts = load_prompts([first, second], make_tokenizer(), data(), 100)
    assert [(p.index, p.text, p.ground_truth, p.data_source) for p in prompts] == [
        (0, "1+1=", "2", "sums"),
        (1, "hi", "7", "arithmetic"),
        (2, "b", "", "arithmetic"),
    ]
    assert prompts[0].token_ids.dtype == np.int64
    assert prompts[0].token_ids.tolist() == ids_of("1+1=")


@pytest.mark.parametrize(
    ("template", "prompt", "expected"),
    [
        ("<bos> $A <eos>", "ab", ("<bos>", "a", "b")),
        ("$A", "ab<eos>", ("a", "b", "<eos>")),
        ("$A <eos>", "ab<eos>", ("a", "b", "<eos>")),
    ],
)
def test_special_tokens_are_added_but_only_an_eos_of_the_text_stays(
    template, prompt, expected, make_tokenizer, ids_of, write_jsonl
):
    file, allowed = write_jsonl({"prompt": prompt}), data(allow_special_tokens=True)
    (found,) = load_prompts(file, make_tokenizer(template), allowed, 100)
    assert found.token_ids.tolist() == ids_of(*expected)


def test_chats_between_texts_are_read_by_the_template_alone(make_tokenizer, ids_of, write_jsonl):
    """The tokenizer's own <bos> is not put before the template's."""
    tokenizer = make_tokenizer("<bos> $A <eos>")
    messages = [{"role": "user", "content": "hi"}]
    file = write_jsonl(*({"prompt": prompt} for prompt in ("a", messages, "c")))
    first, prompt, last = load_prompts(file, tokenizer, data(), 100)
    found = [first.token_ids.tolist(), last.token_ids.tolist()]
    assert found == [ids_of("<bos>", "a"), ids_of("<bos>", "c")]
    assert prompt.text == "<bos><user>hi<assistant>"
    assert prompt.token_ids.tolist() == ids_of("<bos>", "<user>", "h", "i", "<assistant>")
    official = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert prompt.token_ids.tolist() == official["input_ids"]


def test_lists_and_objects_are_ground_truths_as_json_and_as_they_are(make_tokenizer, write_jsonl):
    truth = {"target": ["Ann Lee", "é"]}
    file = write_jsonl({"prompt": "a", "reward_model": {"style": "rule", "ground_truth": truth}})
    config = data(ground_truth_key="reward_model.ground_truth")
    (prompt,) = load_prompts(file, make_tokenizer(), config, 100)
    assert prompt.ground_truth == '{"target": ["Ann Lee", "é"]}'
    assert prompt.extra_info[STRUCTURED] == truth


def test_blank_lines_and_a_byte_order_mark_are_skipped(make_tokenizer, write_jsonl):
    file = write_jsonl(b'\xef\xbb\xbf{"prompt": "a"}', "", {"prompt": 5})
    (problem,) = problems_of(file, make_tokenizer())
    assert problem.startswith(f"{file}:3: ")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("{broken", "a line must be one JSON object, this one is not JSON"),
        ("[1, 2]", "a line must be one JSON object, this one is list"),
        ({"question": "a"},
         "a row must have a 'prompt', this one has question; set data.prompt_key"),
        ({"prompt": None}, "a row must have a 'prompt', here it is null"),
        ({"prompt": float("nan")}, "a row must have a 'prompt', here it is null"),
        ({"prompt": "a", "images": [{"bytes": "AA=="}]}, "a prompt must be text alone, this one"),
        ({"prompt": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]},
         "the last message must be of the user, it is of the assistant"),
        ({"prompt": 12}, "a prompt must be text or a list of chat messages {role, content}, this"),
        ({"prompt": []}, "a prompt must be text or a list of chat messages {role, content}, this"),
        ({"prompt": [{"role": "user"}]}, "a prompt must be text or a list of chat messages"),
        ({"prompt": " "},
         "a prompt must be text or a list of chat messages {role, content} and not"),
        ('{"prompt": "a\\ud800"}', "text must be valid Unicode, \\ud800 is half a character"),
        ({"prompt": "a", "ground_truth": True}, "a ground truth must be text, a number"),
        ({"prompt": "a", "data_source": 3}, "a row must name its data source in 'data_source'"),
        (b'{"prompt": "\xff"}', "a line must be one JSON object, this one is not JSON in UTF-8"),
        ({"prompt": "a" * 101}, "a prompt must fit actor_rollout.max_prompt_length=100, this one"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_with_file_and_row(row, expected, make_tokenizer, write_jsonl):
    file = write_jsonl({"prompt": "good"}, row)
    (problem,) = problems_of(file, make_tokenizer())
    assert problem.startswith(f"{file}:2: {expected}")
    assert "; " in problem  # rule, value; remedy


def test_all_problems_of_all_files_come_at_once(make_tokenizer, write_jsonl, tmp_path):
    bad = write_jsonl("{", {"prompt": 1, "ground_truth": True}, name="bad.jsonl")
    empty = write_jsonl(name="empty.jsonl")
    missing, other = str(tmp_path / "missing.jsonl"), str(tmp_path / "rows.csv")
    problems = problems_of([bad, empty, missing, other, str(tmp_path)], make_tokenizer())
    places = [f"{bad}:1", f"{bad}:2", f"{bad}:2", empty, missing, other, str(tmp_path)]
    assert [problem.split(": ")[0] for problem in problems] == places
    assert "at least one row, this one is empty" in problems[3]
    assert "no such file" in problems[4]
    assert ".parquet, not '.csv'" in problems[5]


def test_equal_problems_are_one_line_and_many_different_ones_are_cut_short(
    make_tokenizer, write_jsonl
):
    rows = [{"question": "a"}] * 50 + [{"prompt": "a" * (11 + i)} for i in range(14)]
    file = write_jsonl(*rows)
    problems = problems_of(file, make_tokenizer(), max_prompt_length=10)
    assert problems[0].startswith(f"{file}:1: ")
    assert problems[0].endswith("(49 more rows have the same problem)")
    assert len(problems) == 11
    assert problems[-1] == f"{file}: 5 more rows with problems like these"


def test_one_prompt_must_be_left(make_tokenizer, write_jsonl):
    file = write_jsonl({"prompt": "aaaa"}, {"prompt": "bbbb"})
    (problem,) = problems_of(file, make_tokenizer(), data(overlong_prompts="drop"), 3)
    assert problem == (
        f"{file}: 2 of 2 prompts are over 3 tokens and none is left; "
        "raise actor_rollout.max_prompt_length"
    )


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([{"role": "user", "content": "a"}], "the tokenizer's chat template must accept the mess"),
        ("xx", "a prompt must have a token"),
    ],
)
def test_a_prompt_that_the_tokenizer_cannot_read_is_named(
    prompt, problem, make_tokenizer, write_jsonl
):
    tokenizer = make_tokenizer(chat_template=None)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("x", "")
    file = write_jsonl({"prompt": prompt})
    (found,) = problems_of(file, tokenizer)
    assert found.startswith(f"{file}:1: {problem}")


def test_the_json_text_of_messages_is_read_as_messages(make_tokenizer, write_jsonl):
    messages = [{"role": "user", "content": "hi"}]
    texts = [json.dumps(messages), "[1, 2]", "[a", json.dumps([{"role": "user"}])]
    file = write_jsonl(*({"prompt": prompt} for prompt in (messages, *texts)))
    chat, same, *others = load_prompts(file, make_tokenizer(), data(), 100)
    assert same.text == chat.text and same.token_ids.tolist() == chat.token_ids.tolist()
    assert [prompt.text for prompt in others] == texts[1:]


def test_columns_that_only_agents_and_models_of_images_read(make_tokenizer, write_jsonl, caplog):
    """They may be empty, and `images` may go to the reward alone."""
    file = write_jsonl({"prompt": "a", "images": [], "tools": None, "agent_name": ""})
    load_prompts(file, make_tokenizer(), data(), 100)
    assert not caplog.records
    file = write_jsonl({"prompt": "a", "images": ["x"], "tools": "[]", "agent_name": "tool_agent"})
    (prompt,) = load_prompts(file, make_tokenizer(), data(extra_columns=["images"]), 100)
    assert prompt.extra_info == {"images": ["x"], "agent_name": "tool_agent"}
    (record,) = caplog.records
    assert "agent_name, tools" in record.getMessage()


def test_rows_with_agents_keep_what_those_read(make_tokenizer, write_jsonl, caplog, ids_of):
    """The columns, and the end of the prompt for an agent that gives first."""
    chat = [{"role": "user", "content": "a"}]
    file = write_jsonl(
        {"prompt": chat, "agent_name": "first", "x": 1, "tools_kwargs": {"f": {"a": 1}}},
        {"prompt": chat, "extra_info": {"tools_kwargs": {"f": {"a": 2}}, "x": 1}},
    )
    keys = data(extra_columns=[])
    gives_first = lambda extra_info: extra_info.get("agent_name") == "first"  # noqa: E731
    first, second = load_prompts(file, make_tokenizer(), keys, 100, gives_first=gives_first)
    assert first.extra_info == {"agent_name": "first", "tools_kwargs": {"f": {"a": 1}}}
    assert second.extra_info == {"tools_kwargs": {"f": {"a": 2}}}
    assert [int(i) for i in first.token_ids] == ids_of("<bos>", "<user>", "a")
    assert [int(i) for i in second.token_ids] == ids_of("<bos>", "<user>", "a", "<assistant>")
    assert not caplog.records
    ending = make_tokenizer()  # as Phi 3: an EOS where no answer begins
    ending.chat_template += "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    first, _ = load_prompts(file, ending, keys, 100, gives_first=gives_first)
    assert [int(i) for i in first.token_ids] == ids_of("<bos>", "<user>", "a")
