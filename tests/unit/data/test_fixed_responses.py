"""Responses from a file: what is read, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.data.fixed_responses import FixedResponses, load_fixed_responses
from tests.unit.data.bench import write_rows

EOS = 2


class Letters:
    """a = 3, b = 4, ..."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) - ord("a") + 3 for letter in text]}


def load(tmp_path: Path, *rows: Any, num_samples: int = 0, name: str = "r.jsonl") -> FixedResponses:
    file = write_rows(tmp_path / name, *rows)
    return load_fixed_responses(file, Letters(), (EOS, 9), 12, 4, num_samples)  # type: ignore[arg-type]


def test_rows_answer_the_samples_in_order_or_by_their_ids(tmp_path: Path) -> None:
    found = load(tmp_path, {"response_ids": [5, 2]}, {"response_ids": [6]}, num_samples=2)
    assert found.by_sample_id == {0: [5, 2], 1: [6]}
    rows = [{"sample_id": 1, "response_ids": [6], "iteration": 1}]
    rows += [{"sample_id": 0, "response_ids": [5]}]
    assert load(tmp_path, *rows, num_samples=2).by_sample_id == {0: [5], 1: [6]}


def test_text_is_ended_by_one_eos_where_there_is_room(tmp_path: Path) -> None:
    found = load(tmp_path, *({"response": text} for text in ("ab", "abab", "ag")))
    # g is token 9, an EOS
    assert found.by_sample_id == {0: [3, 4, EOS], 1: [3, 4, 3, 4], 2: [3, 9]}


def test_files_that_are_absent_or_no_jsonl_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"fixed_responses: .*: no such file; correct"):
        load_fixed_responses(str(tmp_path / "none.jsonl"), Letters(), (EOS,), 12, 4, 1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"must be a \.jsonl file"):
        load(tmp_path, {"response_ids": [3]}, name="r.txt")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "a"}, "a row must have response_ids or a string `response`"),
        ({"response": 3}, "a row must have response_ids or a string `response`"),
        ({"response_ids": "3"}, "response_ids must be a list of token ids, not '3'"),
        ({"response_ids": [3, 1.0]}, "response_ids must be a list of token ids, not [3, 1.0]"),
        ({"response_ids": []}, "a response must have 1 to 4 tokens (max_new_tokens), not 0"),
        ({"response_ids": [3] * 5}, "a response must have 1 to 4 tokens (max_new_tokens), not 5"),
        ({"response_ids": [12]}, "token ids must be from 0 to 11, not 12"),
        ({"response_ids": [-1]}, "token ids must be from 0 to 11, not -1"),
        ({"response_ids": [9, 3]}, "EOS must be the last token, 9 is in the middle"),
        ({"sample_id": "0", "response_ids": [3]}, "a sample_id must be a number that no earlier"),
        ("{", "a line must be one JSON object"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: Any, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, row)
    file = tmp_path / "r.jsonl"
    assert str(caught.value).startswith(f"actor_rollout.fixed_responses: {file}:1: {problem}")


ZERO = {"sample_id": 0, "response_ids": [3]}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"response_ids": [3]}], "the run's 3 samples must have a response each, 2 have none"),
        ([{"sample_id": 2, "response_ids": [3]}], "2 have none (the first: 0)"),
        ([ZERO, {"response_ids": [3]}], "all rows or none must have a sample_id"),
        ([ZERO, ZERO], "a sample_id must be a number that no earlier row has, not 0"),
    ],
)
def test_a_file_that_does_not_answer_every_sample_once_is_refused(
    tmp_path: Path, rows: list[Any], problem: str
) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, *rows, num_samples=3)
    assert problem in str(caught.value)
