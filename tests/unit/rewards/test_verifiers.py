"""Verifiers of the older toolkit by hand, and the rules that data sources choose."""

from typing import Any

import numpy as np
import pytest

from mindspeed_rlxf.config.enums import Verifier
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.rewards.answers import format_score
from mindspeed_rlxf.rewards.manager import RewardManager
from mindspeed_rlxf.rewards.verifiers import (
    accuracy,
    base_accuracy,
    find_answers,
    is_same_answer,
    steps,
    strict_format,
)

GOOD = "<think>2 + 2</think>\n<answer>It is \\boxed{4}.</answer>"


@pytest.mark.parametrize(
    ("response", "score"),
    [("so \\boxed{4}", 1.0), ("so \\boxed{5}", -0.5), ("so 4", -1.0), ("\\boxed{4", -1.0),
     ("\\boxed{5} no, \\boxed{4}", 1.0), ("\\boxed{}", -0.5)],
)  # fmt: skip
def test_accuracy_reads_the_last_box_only(response: str, score: float) -> None:
    assert accuracy(response, "4") == score


@pytest.mark.parametrize(
    ("response", "score"),
    [("so \\boxed{4}", 1.0), ("The answer is 4.", 1.0), ("2 and 2 make 4", 1.0), ("4 or 5", 0.0),
     ("none", 0.0), ("", 0.0)],
)  # fmt: skip
def test_base_accuracy_needs_no_box(response: str, score: float) -> None:
    assert base_accuracy(response, "4") == score


@pytest.mark.parametrize(
    ("mine", "truth", "same"),
    [
        ("\\frac{1}{2}", "0.5", True), ("\\dfrac12", "1/2", True), ("-\\frac{1}{2}", "-.5", True),
        ("1,000", "1000", True), ("$1000$", "1000.0", True), ("50\\%", "50", True),
        ("17 \\text{ cm}", "17", True), ("\\text{Evelyn}", "\\text{evelyn}", True),
        ("\\text{Eve}", "\\text{Evelyn}", False), ("x = 3", "x=3", True),
        ("\\left(1, 2\\right)", "(1,2)", True),
        ("1,2", "12", False), ("1/0", "1/0", True), ("0.333", "1/3", False), ("A", "a", True),
        ("", "", False), ("4", "so\n#### 4", True), ("4", "thus \\boxed{4}", True),
        ("4", "", False), ("9" * 1_000_000, "9", False),
    ],
)  # fmt: skip
def test_answers_are_compared_as_numbers_or_as_normalised_text(
    mine: str, truth: str, same: bool
) -> None:
    assert is_same_answer(mine, truth) is same


@pytest.mark.parametrize(
    ("response", "loose", "strict"),
    [
        (GOOD, 1.0, 1.0),
        (GOOD.replace("\\boxed{4}", "4"), 1.0, -1.0),  # nothing boxed
        ("well " + GOOD, 0.0, -1.0),
        (GOOD + " and more", 0.0, -1.0),
        ("<answer>\\boxed{4}</answer><think>x</think>", 0.0, -1.0),
        (GOOD.replace("2 + 2", "<think>2"), 0.0, -1.0),  # a tag twice
        ("", 0.0, -1.0),
    ],
)
def test_formats(response: str, loose: float, strict: float) -> None:
    assert (format_score(response), strict_format(response)) == (loose, strict)


def test_three_marks_of_steps_are_the_whole_score() -> None:
    assert steps("Step 1: a") == pytest.approx(1 / 3)
    assert steps("First, a\n- b") == pytest.approx(2 / 3)
    assert steps("1. a\n2. b\n3. c\n4. d") == 1.0
    assert steps("just so") == 0.0


def test_the_score_is_the_weighted_sum_for_whatever_data_source() -> None:
    manager = RewardManager({}, [(Verifier.ACC, 0.5), (Verifier.FORMAT, 2.0)])
    right, wrong = manager.score([GOOD, "\\boxed{5}"], ["4", "4"], ["nowhere", "gsm8k"])
    assert right.score == 0.5 * 1.0 + 2.0 * 1.0
    assert right.parts == {"acc": 1.0, "format": 1.0}
    assert wrong.score == 0.5 * -0.5


def test_rows_without_a_ground_truth_are_found_before_the_run() -> None:
    prompts = [Prompt(0, "2+2", np.array([1]), "4", "x"), Prompt(1, "2+3", np.array([1]), " ", "x")]
    problem = str(*RewardManager({}, [(Verifier.ACC, 1.0)]).check(prompts))
    assert problem.startswith("data source 'x' (1 rows) must have ground truths")
    assert "the first without is prompt 1" in problem
    assert RewardManager({}, [(Verifier.STEP, 1.0)]).check(prompts) == []


def one(response: str, source: str = "gsm8k", **more: Any) -> str | None:
    return find_answers([response], [source], {"mine": "gsm8k"}, **more)[0]


@pytest.mark.parametrize(
    ("source", "response", "answer"),
    [
        ("gsm8k", "so 3 + 4 #### 1,000.", "1000"),
        ("gsm8k", "that is $1000.00", "1000"),
        ("gsm8k", "0 or -0.0", "0"),
        ("gsm8k", "-.50", "-1/2"),
        ("Rowan/hellaswag", "I take (B).", "B"),
        ("hendrycks/competition_math", r"so \boxed{0.50}", "1/2"),
        ("gsm8k", "no number", None),
        ("mine", "twelve, 12", "12"),  # reward.rules
        ("arithmetic", "  Five \n", "Five"),  # exact_match
        ("arithmetic", " ", None),
        ("of a user", "The  ANSWER\nis x", "the answer is x"),
    ],
)
def test_an_answer_is_what_the_rule_compares(source: str, response: str, answer: str) -> None:
    assert one(response, source) == answer


def test_answers_for_votes_come_from_the_verifiers_if_there_are_some() -> None:
    boxed = r"so \boxed{\frac{1}{2}}, not 3"
    assert one(boxed, verifiers=[(Verifier.FORMAT, 1.0), (Verifier.ACC, 1.0)]) == "1/2"
    assert one("so 0.5", verifiers=[(Verifier.BASE_ACC, 1.0)]) == "1/2"
    assert one("so 0.5", verifiers=[(Verifier.ACC, 1.0)]) is None
    assert one(r"\boxed{X}", verifiers=[(Verifier.ACC, 1.0)]) == "x"
    assert one("Step 1:  go", verifiers=[(Verifier.STEP, 1.0)]) == "step 1: go"


def prompt(index: int, ground_truth: str, data_source: str) -> Prompt:
    return Prompt(index, f"question {index}", np.array([1]), ground_truth, data_source)


def test_each_row_is_scored_by_the_rule_of_its_data_source():
    """`18.0` is 18 by value but not by text."""
    manager = RewardManager({"mine": "gsm8k"})
    sources = ["arithmetic", "openai/gsm8k", "mine"]
    results = manager.score(["18.0"] * 3, ["18"] * 3, sources)
    assert [result.score for result in results] == [0.0, 1.0, 1.0]
    assert [result.parts["accuracy"] for result in results] == [0.0, 1.0, 1.0]
    (result,) = RewardManager({"arithmetic": "gsm8k"}).score(["18.0"], ["18"], ["arithmetic"])
    assert result.score == 1.0  # the configuration overrides a built-in rule


def test_an_unknown_rule_is_a_user_error():
    with pytest.raises(UserError) as error:
        RewardManager({"a": "gms8k", "b": "exact_match", "c": "x"})
    first, second = map(str, error.value.problems)
    assert first.startswith("reward.rules.a='gms8k' must name a rule; use one of agent, code, ")
    assert second.startswith("reward.rules.c='x'")


def test_truths_that_no_response_can_equal_are_found_before_the_run() -> None:
    truths = {
        "math": ["12:00", r"\frac{1}{2}", r"\text{Evelyn}", r"\frac{1}{", r"\boxed{}", "$ $"],
        "gsm8k_verl": ["18", "-1.5", "1,234", "eighteen"],
        "math_verl": [r"\frac{1}{2}", "}"],
        "math_dapo_verl": [r"\frac{1}{2}", "3\n4"],
    }
    prompts = [
        prompt(place, truth, rule)
        for rule, group in truths.items()
        for place, truth in enumerate(group)
    ]
    problems = [*map(str, RewardManager({rule: rule for rule in truths}).check(prompts))]
    assert "is prompt 3 " in problems[0] and "also prompt 4, prompt 5" in problems[0]
    said = [problem.partition(" must have")[0] for problem in problems]
    assert said == [
        "data source 'math' (3 rows)",
        "data source 'gsm8k_verl' (2 rows)",
        "data source 'math_verl' (1 rows)",
        "data source 'math_dapo_verl' (1 rows)",
    ]


def test_truths_that_are_compared_as_text_alone_are_named_with_their_rows() -> None:
    truths = ["3", "12:00", r"\sqrt{8}", "x =", r"\text{Evelyn}", r"\sqrt{}", "x ="]
    prompts = [prompt(place, truth, "mine") for place, truth in enumerate(truths)]
    (line,) = RewardManager({"mine": "math"}).find_unparsed(prompts)
    assert line.endswith(r"prompt 3 ('x ='), prompt 6 ('x ='), prompt 5 ('\\sqrt{}')")
    assert RewardManager({"mine": "gsm8k"}).find_unparsed(prompts) == []


def test_check_finds_sources_without_a_rule_and_ground_truths_without_an_answer():
    prompts = [
        prompt(0, "7", "arithmetic"),
        prompt(1, "", "arithmetic"),
        prompt(2, "seven", "gsm8k"),
        prompt(3, " ", "arithmetic"),
        prompt(4, "7", "puzzles"),
        prompt(5, "so\n#### 7", "gsm8k"),
        prompt(6, '{"inputs": ["1"], "outputs": []}', "taco"),
    ]
    problems = RewardManager({"taco": "code"}).check(prompts)
    arithmetic, gsm8k, unknown, taco = map(str, problems)
    assert "or inputs and as many outputs, not 1 and 0; correct the rows" in taco
    assert unknown.startswith("data source 'puzzles' (1 rows) must have a rule")
    assert arithmetic.startswith("data source 'arithmetic' (2 rows) must have ground truths")
    assert "the first without is prompt 1 ('question 1') with ''" in arithmetic
    assert gsm8k.startswith("data source 'gsm8k' (1 rows) must have ground truths")
