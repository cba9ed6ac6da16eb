"""Prompts from an indexed data set are those from the files that it was made of."""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.handlers import MapKeys
from mindspeed_rlxf.data.indexed_prompts import IndexedPrompts, load_indexed_prompts
from mindspeed_rlxf.data.prompts import Prompt, load_prompts
from mindspeed_rlxf.data.sidecar import Column, Sidecar, TokenizerId, data_path, sidecar_path
from mindspeed_rlxf.data.tokenizer import load_tokenizer, vocabulary_hash
from tests.unit.data.bench import Bench
from tests.unit.data.byte_tokenizer import SPECIAL, byte_tokenizer, write_tokenizer
from tests.unit.data.plain_pairs import write_pair

ROWS = [
    {"prompt": "1+1=", "ground_truth": "2", "data_source": "sums"},
    {"prompt": "größe 数学", "ground_truth": 7.5, "data_source": None},
    {"prompt": "a<|im_end|>", "info": {"truth": "x"}},
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    return write_tokenizer(folder, frame="<s> $A <|end_of_text|>")


def config(**keys: Any) -> DataConfig:
    return DataConfig(**{"data_path": ["unused"], "default_data_source": "plain", **keys})


def make(folder: Path, tokenizer: str, rows: list[Any], name: str = "set", **options: Any) -> str:
    bench, prefix = Bench(folder, tokenizer), str(folder / name)
    values = {"map_keys": MapKeys(prompt="prompt", query=None), "output_prefix": prefix, **options}
    bench.run(bench.write(f"{name}.jsonl", *rows), **values)
    return prefix


def load(tokenizer: str, *prefixes: str, limit: int = 100, **keys: Any) -> IndexedPrompts:
    return load_indexed_prompts(prefixes, load_tokenizer(tokenizer), config(**keys), limit)


def problems_of(tokenizer: str, *prefixes: str, **keys: Any) -> list[str]:
    with pytest.raises(UserError) as error:
        load(tokenizer, *prefixes, **keys)
    return list(map(str, error.value.problems))


def essence(prompts: list[Prompt]) -> list[tuple[int, list[int], str, str]]:
    assert all(p.token_ids.dtype == np.int64 for p in prompts)
    return [(p.index, p.token_ids.tolist(), p.ground_truth, p.data_source) for p in prompts]


@pytest.mark.parametrize("truth", ["ground_truth", "info.truth"])
def test_the_empty_template_gives_the_prompts_of_the_files(
    truth: str, tokenizer_folder: str, tmp_path: Path
) -> None:
    prefix = make(tmp_path, tokenizer_folder, ROWS)
    files = [f"{prefix}.jsonl"] * 2
    tokenizer = load_tokenizer(tokenizer_folder)
    expected = load_prompts(files, tokenizer, config(ground_truth_key=truth), 100)
    found = load(tokenizer_folder, prefix, prefix, ground_truth_key=truth)
    assert essence(found.prompts) == essence(expected)
    assert [p.text for p in found.prompts[:2]] == ["<s>1+1=", "<s>größe 数学"]
    assert found.stop_token_ids == ()


def test_stop_tokens_of_all_data_sets_come_back(tokenizer_folder: str, tmp_path: Path) -> None:
    rows = [{"prompt": "a"}]
    names = ("llama3", "qwen")
    prefixes = [make(tmp_path, tokenizer_folder, rows, name, template=name) for name in names]
    stops = load(tokenizer_folder, *prefixes, limit=1000).stop_token_ids
    assert stops == (SPECIAL.index("<|im_end|>"), SPECIAL.index("<|eot_id|>"))


@pytest.mark.parametrize(
    ("policy", "texts", "said"),
    [
        ("drop", ["<s>abc"], "1 of 2 prompts are over 4 tokens and dropped"),
        ("keep_head", ["<s>abc", "<s>abc"], "over 4 tokens and truncated to their first 4"),
        ("keep_tail", ["<s>abc", "cdef"], "over 4 tokens and truncated to their last 4"),
    ],
)
def test_long_prompts_follow_the_policy_in_both_forms(
    policy: str, texts: list[str], said: str, tokenizer_folder: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    prefix = make(tmp_path, tokenizer_folder, [{"prompt": "abc"}, {"prompt": "abcdef"}])
    (problem,) = problems_of(tokenizer_folder, prefix, limit=4)
    assert problem.startswith(f"{prefix}:2: a prompt must fit actor_rollout.max_prompt_length=4")
    data = config(overlong_prompts=policy)
    tokenizer = load_tokenizer(tokenizer_folder)
    with caplog.at_level(logging.WARNING):
        of_files = load_prompts(f"{prefix}.jsonl", tokenizer, data, 4)
        of_index = load_indexed_prompts([prefix], tokenizer, data, 4).prompts
    assert [p.text for p in of_index] == texts
    assert essence(of_index) == essence(of_files)
    assert caplog.text.count(said) == 2 and caplog.text.count(f"overlong_prompts={policy}") == 2


def test_another_tokenizer_is_an_error_that_names_both(
    tokenizer_folder: str, tmp_path: Path
) -> None:
    prefix = make(tmp_path, tokenizer_folder, ROWS)
    other = write_tokenizer(tmp_path / "other", special=[*SPECIAL, "<new>"])
    (problem,) = problems_of(other, prefix)
    assert problem.startswith(f"{prefix}: the tokenizer must be the one it was made with, ")
    assert tokenizer_folder in problem and other in problem


@pytest.mark.parametrize(
    ("made", "found", "remedy"),
    [
        (True, "false says, it was made with --allow", "set data.allow_special_tokens=true or run"),
        (False, "true says, it was made without --allow", "set data.allow_special_tokens=false or"),
    ],
)
def test_special_tokens_of_texts_are_read_as_the_configuration_says(
    made: bool, found: str, remedy: str, tokenizer_folder: str, tmp_path: Path
) -> None:
    prefix = make(tmp_path, tokenizer_folder, ROWS, allow_special_tokens=made)
    (*_, spelling) = load(tokenizer_folder, prefix, allow_special_tokens=made).prompts
    assert (SPECIAL.index("<|im_end|>") in spelling.token_ids) is made
    (problem,) = problems_of(tokenizer_folder, prefix, allow_special_tokens=not made)
    assert problem.startswith(f"{prefix}: must be made as data.allow_special_tokens={found}")
    assert remedy in problem


def test_a_data_set_that_says_nothing_of_special_tokens_reads_them_as_text(
    tokenizer_folder: str, tmp_path: Path
) -> None:
    """As those of older versions do."""
    prefix = make(tmp_path, tokenizer_folder, ROWS)
    sidecar = sidecar_path(Path(prefix))
    tree = json.loads(sidecar.read_text())
    assert tree.pop("allow_special_tokens") is False
    sidecar.write_text(json.dumps(tree))
    assert len(load(tokenizer_folder, prefix).prompts) == 3
    assert len(problems_of(tokenizer_folder, prefix, allow_special_tokens=True)) == 1


def write_old(prefix: Path, columns: dict[str, list[list[int]]]) -> str:
    """A data set of the older toolkit: token ids in every column, no sidecar."""
    for column, rows in columns.items():
        write_pair(data_path(prefix, column), rows)
    return str(prefix)


def make_sidecar(tokenizer: str, names: Iterable[str]) -> Sidecar:
    own = TokenizerId(path=tokenizer, sha256=vocabulary_hash(load_tokenizer(tokenizer)))
    columns = [
        Column(name=n, file=n, dtype="int32", encoding="labels" if "labels" in n else "token_ids")
        for n in names
    ]
    return Sidecar(
        handler="h", template="t", stop_token_ids=(), tokenizer=own, columns=columns, counts={}
    )


def test_without_a_sidecar_columns_are_decoded_with_a_notice(
    tokenizer_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encode = lambda text: byte_tokenizer()(text)["input_ids"]  # noqa: E731
    prefix = write_old(
        tmp_path / "old",
        {"input_ids": [encode("ab"), encode("数")], "attention_mask": [[1, 1], [1, 1, 1]],
         "labels": [[-100, *encode("12<|end_of_text|>")], encode("答")]},
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        found = load(tokenizer_folder, prefix, ground_truth_key="labels")
    assert [(p.text, p.ground_truth) for p in found.prompts] == [("ab", "12"), ("数", "答")]
    assert found.stop_token_ids == ()
    assert "no old_packed_meta.json beside it" in caplog.text


@pytest.mark.parametrize("has_sidecar", [False, True])
def test_old_conversations_and_pairs_give_the_prompt_before_the_last_response(
    has_sidecar: bool, tokenizer_folder: str, tmp_path: Path
) -> None:
    ids = byte_tokenizer()("qansQAN")["input_ids"]
    labels = [-100, *ids[1:4], -100, *ids[5:]]
    conversations = {"input_ids": [ids], "labels": [labels], "attention_mask": [[1] * 7]}
    pairs = {
        "chosen_input_ids": [ids],
        "chosen_labels": [[-100] * 5 + ids[5:]],
        "rejected_input_ids": [ids],
        "rejected_labels": [ids],
    }
    for name, columns in (("talks", conversations), ("pairs", pairs)):
        prefix = write_old(tmp_path / name, columns)
        if has_sidecar:  # as earlier versions wrote it
            sidecar = make_sidecar(tokenizer_folder, columns)
            sidecar_path(Path(prefix)).write_text(sidecar.model_dump_json())
        found = load(tokenizer_folder, prefix)
        assert [p.text for p in found.prompts] == ["qansQ"]


def test_ids_that_the_tokenizer_lacks_and_empty_sequences_are_named(
    tokenizer_folder: str, tmp_path: Path
) -> None:
    prefix = write_old(tmp_path / "old", {"input_ids": [[1, 2], [3, 99_999], [-1], []]})
    problems = problems_of(tokenizer_folder, prefix)
    rules = ("a token id must be", "a token id must be", "a prompt must have a token")
    for row, (problem, rule) in enumerate(zip(problems, rules, strict=True), start=2):
        assert problem.startswith(f"{prefix}:{row}: {rule}")


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        ("meta.json", Path.unlink, "must be whole, there is no set_packed_meta.json"),
        ("input_ids_document.bin", lambda file: file.write_bytes(b""), "must be whole, "),
        ("ground_truth_document.idx", Path.unlink, "no set_packed_ground_truth_document.idx"),
        ("ground_truth_document", lambda path: write_pair(path, [[1]], code=1),
         "set_packed_ground_truth_document must have 3 rows, it has 1"),
        ("meta.json", lambda file: file.write_text('{"format_version": 2}'),
         "format_version is not valid (Input should be 1)"),
        ("meta.json", lambda file: file.write_text("["),
         "meta.json: it is not valid (Invalid JSON: ",),
        ("meta.json", lambda file: file.write_text('{"format_version": 1}'),
         "set_packed_meta.json: handler is not valid"),
    ],
)  # fmt: skip
def test_a_damaged_data_set_is_named(
    file: str, damage: Any, problem: str, tokenizer_folder: str, tmp_path: Path
) -> None:
    prefix = make(tmp_path, tokenizer_folder, ROWS)
    damage(Path(f"{prefix}_packed_{file}"))
    (found,) = problems_of(tokenizer_folder, prefix)
    assert problem in found and "; " in found


def test_every_absent_data_set_is_named(tokenizer_folder: str, tmp_path: Path) -> None:
    assert load(tokenizer_folder) == IndexedPrompts()
    prefixes = [str(tmp_path / "a"), str(tmp_path / "none" / "b")]
    problems = problems_of(tokenizer_folder, *prefixes)
    assert [problem.split(": ")[0] for problem in problems] == prefixes
    assert all("must be the --output-prefix of an indexed data set" in p for p in problems)
