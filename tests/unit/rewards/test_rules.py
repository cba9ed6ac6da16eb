"""Rules give 1 for a right answer and 0 for any other."""

from __future__ import annotations

import json
import os
import re
from decimal import Decimal
from pathlib import Path

import pytest

from mindspeed_rlxf.rewards.rules import RewardResult, exact_match, gsm8k

REPO = Path(__file__).parents[3]
GSM8K = Path(os.environ.get("RLXF_DATA", REPO / "../shared/data")) / "gsm8k"

RIGHT = RewardResult(1.0, {"accuracy": 1.0})
WRONG = RewardResult(0.0, {"accuracy": 0.0})


@pytest.mark.parametrize(
    ("response", "result"),
    [("46", RIGHT), (" 46\n", RIGHT), ("46.", WRONG), ("046", WRONG), ("4 6", WRONG), ("", WRONG)],
)
def test_exact_match_ignores_white_space_around_only(response, result):
    assert exact_match(response, "46") == result


@pytest.mark.parametrize(
    "response",
    [
        "She makes 9 * 2 = $18\n#### 18",
        "#### 18 \nQuestion: what is next? #### 5",  # the first mark counts
        "####18",
        "#### $18.00",
        "The answer is 18.",
        "first 5, then 18",
        "20-2 leaves 18 dollars",
        "#### eighteen, that is 18",
        "it is 18 ####",  # nothing behind the mark: the last number
    ],
)
def test_gsm8k_finds_the_final_answer(response):
    assert gsm8k(response, "16 - 3 - 4 = <<16-3-4=9>>9\n#### 18") == RIGHT


@pytest.mark.parametrize("response", ["", "none", "18 then 5", "#### 5 or 18", "-18", "1.8", "180"])
def test_gsm8k_gives_nothing_for_another_answer(response):
    assert gsm8k(response, "18") == WRONG


@pytest.mark.parametrize(
    ("response", "ground_truth"),
    [
        ("1,234,567", "1234567"),
        ("$1,000.50", "1000.5"),
        ("-3", "#### -3"),
        ("-$3", "-3"),
        ("\u22123", "-3"),  # the minus sign of typeset text
        (".5", "0.5"),
        ("10-7=3", "3"),
        ("7-3", "3"),  # an operator is no sign
        ("(4)-3", "3"),
    ],
)
def test_gsm8k_compares_numbers_by_value(response, ground_truth):
    assert gsm8k(response, ground_truth) == RIGHT


@pytest.mark.parametrize(
    ("response", "ground_truth", "result"),
    [
        # Decimal arithmetic rounds to 28 digits, a comparison must not.
        (f"-{'1' * 40}", f"-{'1' * 40}", RIGHT),
        (f"-{'1' * 40}2", f"-{'1' * 40}3", WRONG),
        ("no number", "no number", WRONG),
    ],
)
def test_gsm8k_compares_all_digits_and_needs_some(response, ground_truth, result):
    assert gsm8k(response, ground_truth) == result


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"no GSM8K in {GSM8K}; set RLXF_DATA")
@pytest.mark.parametrize("split", ["train", "test"])
def test_gsm8k_agrees_with_the_data_sets_own_pattern(split):
    """openai/grade-school-math reads answers with this pattern; `one more` is a wrong answer."""
    pattern = re.compile(r"#### (\-?[0-9\.\,]+)")
    with open(GSM8K / f"{split}.jsonl", encoding="utf-8") as rows:
        solutions = [json.loads(row)["answer"] for row in rows]
    assert len(solutions) in (7473, 1319)
    for solution in solutions:
        answer = pattern.search(solution).group(1).replace(",", "")
        assert gsm8k(solution, solution) == RIGHT
        assert gsm8k(f"The answer is {answer}.", solution) == RIGHT
        assert gsm8k(f"#### {Decimal(answer) + 1}", solution) == WRONG
