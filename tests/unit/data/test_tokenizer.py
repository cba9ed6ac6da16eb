"""Loading a tokenizer from a folder, its EOS set, and its fit to the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.data.tokenizer import (
    check_vocabulary,
    describe_stop_tokens,
    eos_token_ids,
    load_tokenizer,
)
from tests.unit.data.byte_tokenizer import byte_tokenizer


def problem_of(path) -> str:
    with pytest.raises(UserError) as error:
        load_tokenizer(str(path))
    (problem,) = map(str, error.value.problems)
    assert problem.startswith(
        f"training.tokenizer_name_or_path={str(path)!r} must be a folder with a Hugging Face "
    )
    assert problem.endswith("; give the folder of the model's tokenizer")
    return problem


@pytest.mark.parametrize("path", ["./no/such/folder", "no-such-organisation/m"])
def test_a_missing_folder_is_a_user_error(path):
    assert "there is no such folder" in problem_of(path)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("README.md", ""),
        ("config.json", '{"model_type": "llama"}'),
        # For qwen2 transformers makes a tokenizer with one special token and nothing else.
        ("config.json", '{"model_type": "qwen2"}'),
        ("tokenizer.json", "{broken"),
    ],
)
def test_a_folder_without_a_whole_tokenizer_is_a_user_error(file, text, tmp_path):
    (tmp_path / file).write_text(text)
    problem_of(tmp_path)


def test_code_in_the_folder_is_not_run(tmp_path):
    mark = tmp_path / "was_run"
    (tmp_path / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own: ...\n")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    problem_of(tmp_path)
    assert not mark.exists()


def test_importing_the_driver_side_does_not_import_transformers():
    modules = (
        "data.prompts", "data.indexed_prompts", "data.preprocessing.pipeline", "data.tokenizer",
        "data.sampler", "rewards.manager", "checkpoint.directory",
    )  # fmt: skip
    imports = "; ".join(f"import mindspeed_rlxf.{name}" for name in modules)
    absent = "assert not {'transformers', 'torch', 'ray'} & set(sys.modules)"
    program = f"{imports}; import sys; {absent}"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], check=True)


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        (None, (2, 9)),
        ({}, (2, 9)),
        ({"eos_token_id": None}, (2, 9)),
        ({"eos_token_id": 4}, (2, 4, 9)),
        ({"eos_token_id": [12, 2, 4]}, (2, 4, 9, 12)),
    ],
)
def test_eos_ids_are_the_union_of_their_sources(
    generation_config, expected, make_tokenizer, tmp_path
):
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert eos_token_ids(make_tokenizer(), str(tmp_path), [9]) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (2,)),
        ({"eos_token_id": [4, 12]}, (2, 4, 12)),
        ({"text_config": {"eos_token_id": 4}}, (2, 4)),
    ],
)
def test_config_json_names_eos_ids_without_a_generation_config(
    config, expected, make_tokenizer, tmp_path
):
    """As transformers reads them."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert eos_token_ids(make_tokenizer(), str(tmp_path), []) == expected
    (tmp_path / "generation_config.json").write_text("{}")
    assert eos_token_ids(make_tokenizer(), str(tmp_path), []) == (2,)


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": ["x"]}'])
def test_a_broken_generation_config_is_a_user_error(text, make_tokenizer, tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        eos_token_ids(make_tokenizer(), str(tmp_path), [])
    assert str(error.value).startswith(f"{file}: must be a JSON object whose eos_token_id")


def test_the_vocabulary_has_to_hold_the_largest_id(make_tokenizer):
    tokenizer = make_tokenizer()
    largest = max(tokenizer.get_vocab().values())
    assert check_vocabulary(tokenizer, largest + 1) == []
    problem = str(*check_vocabulary(tokenizer, largest))
    said = f"vocab_size={largest} must be larger than the tokenizer's largest token id {largest}"
    assert problem.startswith(said) and problem.endswith(f"vocab_size >= {largest + 1}")


def test_stop_tokens_are_described_with_their_sources(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    tokenizer = byte_tokenizer(eos="</s>")
    line = describe_stop_tokens(tokenizer, str(tmp_path), [4], [4, 9])
    assert line == (
        "responses end with: 0 '<pad>' (generation_config.json); "
        "2 '</s>' (tokenizer, generation_config.json); "
        "4 '<|im_end|>' (template of the data set, stop_token_ids); "
        "9 '<|eot_id|>' (stop_token_ids)"
    )
    unknown = len(tokenizer)  # below the vocab_size of a model with padded rows
    line = describe_stop_tokens(tokenizer, None, [], [unknown])
    assert line.endswith(f"; {unknown} not in the vocabulary (stop_token_ids)")
    tokenizer.eos_token = None
    assert describe_stop_tokens(tokenizer, None, [], []).endswith(": nothing but max_new_tokens")
