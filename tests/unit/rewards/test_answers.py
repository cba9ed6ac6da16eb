"""The built-in rules on answers that were written by hand."""

import json
import os
import re
import subprocess
import sys
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from mindspeed_rlxf.rewards.answers import (
    format_score,
    length_score,
    multiple_choice,
    search_score,
    search_targets,
)
from mindspeed_rlxf.rewards.rules import (
    BUILTIN_SOURCES,
    RULES,
    RewardResult,
    exact_match,
    gsm8k,
    gsm8k_flexible,
    gsm8k_strict,
)
from mindspeed_rlxf.rewards.verifiers import strict_format

REPO = Path(__file__).parents[3]
CASES: dict[str, list[tuple[str, str, float]]] = yaml.safe_load(
    Path(__file__).with_name("answer_cases.yaml").read_text(encoding="utf-8")
)
"""Rule, perhaps with its method -> response, ground truth, score."""
GSM8K = Path(os.environ.get("RLXF_DATA", REPO / "../shared/data")) / "gsm8k"

# response, ground truth, whether it is right
NUMBERS = [
    ("The answer is 1,234.", "1234", True), ("1,234,567 people", "1234567", True),
    ("12,34", "1234", False),  # no thousands separator
    ("$1,000", "1000", True), ("1000.00 dollars", "1,000", True), ("18kg", "18", True),
    ("It takes 3 hours", "180", False), ("-$5", "-5", True), ("$-5", "-5", True),
    ("\u22125 degrees", "-5", True), ("10-5", "5", True), ("5", "-5", False),
    ("0.5", "1/2", True),
    (".75", "0.75", True), ("3.140", "3.14", True), ("3.14159", "3.14", False),
    ("50\\%", "50", True), ("50%", "0.5", False),
    ("I do not know.", "18", False), ("", "18", False), ("####", "18", False),
    ("3 and 4 make 7", "7", True), ("7, because 3 and 4", "7", False),
    ("#### 7 and then 8", "7", True), ("#### 7 #### 8", "8", False), ("so $18$.", "18", True),
    ("\\boxed{18} for 3 people", "18", True), ("\\boxed{\\$1{,}234}", "1234", True),
    ("\\boxed{1\\,234}", "1234", True), ("\\boxed{\\frac{1}{2}}", "0.5", True),
    ("\\boxed{-\\dfrac{3}{4}}", "-0.75", True), ("\\boxed{\\frac{1}{0}}", "1", False),
    ("\\boxed{18} #### 19", "19", True), ("\\boxed{x = 18\\text{ cm}}", "18", True),
    ("\\boxed{17}, or \\boxed{18}", "18", True), ("\\boxed{}", "18", False),
    ("#### 18 \nQuestion: what is next? #### 5", "16 - 3 - 4 = <<16-3-4=9>>9\n#### 18", True),
    ("#### eighteen, that is 18", "18", True), ("no number", "no number", False),
    ("it is 18 ####", "18", True),  # nothing behind the mark: the last number
    ("-3", "#### -3", True),
    ("7-3", "3", True), ("(4)-3", "3", True),  # an operator is no sign
    # Decimal arithmetic rounds to 28 digits, a comparison must not.
    (f"-{'1' * 40}2", f"-{'1' * 40}3", False),
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "right"), NUMBERS)
def test_gsm8k_reads_answers_as_people_write_them(response: str, truth: str, right: bool) -> None:
    assert gsm8k(response, truth).score == float(right)


@pytest.mark.parametrize(
    ("response", "right"),
    [("46", True), (" 46\n", True), ("46.", False), ("046", False), ("4 6", False), ("", False)],
)
def test_exact_match_ignores_white_space_around_only(response: str, right: bool) -> None:
    assert exact_match(response, "46") == RewardResult(float(right), {"accuracy": float(right)})


def test_strict_and_flexible_differ_in_the_mark() -> None:
    truth = "#### 18"
    found = [
        [rule(text, truth).score for rule in (gsm8k_strict, gsm8k_flexible, gsm8k)]
        for text in ("#### 18", "It is 18.", "#### 18, not 20", "#### 20, not 18")
    ]
    assert found == [[1, 1, 1], [0, 1, 1], [1, 0, 1], [0, 1, 0]]


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"no GSM8K in {GSM8K}; set RLXF_DATA")
def test_gsm8k_tells_reference_answers_from_the_next_and_from_those_off_by_one() -> None:
    """openai/grade-school-math reads answers with this pattern."""
    pattern = re.compile(r"#### (\-?[0-9\.\,]+)")
    rows = [
        json.loads(line)["answer"]
        for split in ("train", "test")
        for line in (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(rows) == 8792
    answers = [Decimal(pattern.findall(row)[0].replace(",", "")) for row in rows]
    for (row, following), (own, other) in zip(pairwise(rows), pairwise(answers), strict=True):
        assert gsm8k(row, row).score == gsm8k(f"The answer is {own}.", row).score == 1.0
        assert gsm8k(following, row).score == float(own == other)
        assert gsm8k(f"#### {own + 1}", row).score == 0.0


CHOICES = [
    ("The answer is (B).", "B", True), ("The answer is B", "(B)", True),
    ("Answer: **C**", "C", True), ("\\boxed{D}", "D", True),
    ("\\boxed{\\text{(D)}}", "D", True), ("\\boxed{AB}", "A", False),
    ("A is wrong, so the answer is B. \\boxed{A}", "B", False), ("First A, then B.\nC", "C", True),
    ("I choose (A).", "A", True), ("A good question", "A", False), ("#### B", "B", True),
    ("The answer is A. No, the answer is B.", "B", True), ("B", "C", False), ("", "A", False),
    ("The answer is Z", "Z", False),  # no choice
    ("The answer is b\nBecause it rains.", "B", True), ("The answer is a triangle.", "A", False),
    ("Answer: c\n\nExplanation: none", "C", True), ("The answer is\n\n  B because", "B", True),
    ("answer" + " " * 100_000, "A", False),  # in linear time
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "right"), CHOICES)
def test_a_choice_is_the_letter_that_is_named_as_the_answer(
    response: str, truth: str, right: bool
) -> None:
    assert multiple_choice(response, truth) == float(right)


def test_format_and_length_take_arguments() -> None:
    good = "<think>\nso\n</think>\n<answer>4</answer>"
    assert [format_score(text) for text in (good, "4", good + "4")] == [1.0, 0.0, 0.0]
    good = good.replace("4", "\\boxed{4}")
    opened_by_prompt = good.removeprefix("<think>")
    assert format_score(opened_by_prompt) == strict_format(opened_by_prompt) == 1.0
    for twice in ("<think>a</think> " + good, good.replace("so", "<think>"), good + good):
        assert (format_score(twice), strict_format(twice)) == (0.0, -1.0)
    assert RULES["format"]("abc", "", pattern="[a-c]+").score == 1.0
    lengths = [RULES["length"](text, "", max_characters=4, min_characters=2) for text in
               ("", "a", " ab ", "abcd", "abcdefgh")]  # fmt: skip
    assert [result.score for result in lengths] == [0.0, 0.0, 1.0, 1.0, 0.5]
    assert length_score("a" * 4001) < 1.0


@pytest.mark.parametrize("rule", CASES)
def test_responses_score_as_in_the_table(rule: str) -> None:
    name, _, method = rule.partition(" ")
    arguments = {"method": method} if method else {}
    wrong = [
        (response, truth)
        for response, truth, score in CASES[rule]
        if RULES[name](response.replace("\\n", "\n"), truth, **arguments).score != score
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("<answer>the  ann lee.</answer>", '{"target": ["Ann Lee", "A. Lee"]}', 1.0),
        ("<answer>Bob</answer> <answer>A Lee</answer>", '["The Lee"]', 1.0),  # articles
        ("<answer>Ann</answer> no, <answer>Bob</answer>", '["Ann"]', 0.0),
        ("Ann Lee", '["Ann Lee"]', 0.0),
        ("<answer>1912</answer>", "1912", 1.0),
    ],
)
def test_answers_of_a_search_by_hand(response, truth, score):
    assert search_score(response, truth) == score


def test_the_answer_that_dapos_rule_read_is_a_part_of_its_score():
    assert RULES["math_dapo_verl"]("Answer: $2$", "3").parts == {"accuracy": 0.0, "pred": "2"}


def test_a_search_without_expected_answers_has_none():
    assert search_targets('{"target": []}') == search_targets("null") == search_targets("") == []
    assert search_targets("7") == ["7"]


def test_verls_data_sources_have_rules():
    sources = ("aime2024", "numina_cn_k12", "hiyouga/geometry3k", "searchR1_nq", "apps", "taco")
    assert [BUILTIN_SOURCES[source] for source in sources] == [
        "math", "math", "math", "search_qa", "code", "code"
    ]  # fmt: skip
    # In a process that has imported no rules of programs; the response has no program.
    program = (
        "from mindspeed_rlxf.rewards.scoring import *\n"
        "from mindspeed_rlxf.rewards.rules import BUILTIN_SOURCES\n"
        "sample = Sample('p', 'none', '{\"inputs\": [\"1\"], \"outputs\": [\"1\"]}', 'apps')\n"
        "assert SampleScorer(Plan((), BUILTIN_SOURCES)).score(sample).score == 0.0\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPO, check=True)
