"""The demo's task: data, tokenizer, wrong responses."""

import random
from pathlib import Path

import pytest
from tiny_task import EOS_ID, PAD_ID, TOKENS, Problem, corrupt, make_split, make_tokenizer
from transformers import AutoTokenizer


def test_no_problem_is_in_two_parts_and_none_is_lost() -> None:
    split = make_split(1)
    everything = split.train + split.val + split.spare
    assert len(everything) == len(set(everything)) == 90 * 90
    assert (len(split.train), len(split.val)) == (4000, 512)
    assert make_split(1) == split and make_split(2).val != split.val


def test_a_saved_tokenizer_gives_one_id_per_character_and_adds_none(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ids = tokenizer("90+17=107")["input_ids"]
    assert ids == [TOKENS.index(c) for c in "90+17=107"]
    assert tokenizer.decode([*ids, EOS_ID, PAD_ID], skip_special_tokens=True) == "90+17=107"
    assert len(tokenizer) == 16
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, EOS_ID)
    assert PAD_ID != EOS_ID


@pytest.mark.parametrize("answer", ["20", "46", "198"])
def test_a_corrupted_response_is_wrong_and_fits(answer: str) -> None:
    rng = random.Random(0)
    drawn = [corrupt(answer, rng, max_length=8) for _ in range(2000)]
    assert (answer, True) not in drawn
    assert all(len(text) + ends <= 8 for text, ends in drawn)
    # A response without EOS is cut off by the limit, never before it.
    assert {len(text) for text, ends in drawn if not ends} == {8}
    whole = [int(text) for text, ends in drawn if ends and text.isdigit()]
    assert sum(abs(number - int(answer)) <= 20 for number in whole) > 800


@pytest.mark.parametrize(
    ("left", "right", "without_carry"),
    [(12, 34, "46"), (15, 37, "42"), (95, 17, "102"), (99, 99, "188")],
)
def test_the_answer_without_carry_leaves_out_the_carry_of_the_ones(
    left: int, right: int, without_carry: str
) -> None:
    assert Problem(left, right).answer_without_carry == without_carry
