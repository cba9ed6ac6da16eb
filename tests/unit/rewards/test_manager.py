"""The data source chooses the rule; samples that no rule can score are found before training."""

import numpy as np
import pytest

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.rewards.manager import RewardManager


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
    assert first.startswith("reward.rules.a='gms8k' must name a rule; use one of code, ")
    assert second.startswith("reward.rules.c='x'")


def test_check_finds_sources_without_a_rule_and_ground_truths_without_an_answer():
    prompts = [
        prompt(0, "7", "arithmetic"),
        prompt(1, "", "arithmetic"),
        prompt(2, "seven", "gsm8k"),
        prompt(3, " ", "arithmetic"),
        prompt(4, "7", "math"),
        prompt(5, "so\n#### 7", "gsm8k"),
        prompt(6, '{"inputs": ["1"], "outputs": []}', "taco"),
    ]
    problems = RewardManager({"taco": "code"}).check(prompts)
    arithmetic, gsm8k, unknown, taco = map(str, problems)
    assert "or inputs and as many outputs, not 1 and 0; correct the rows" in taco
    assert unknown.startswith("data source 'math' (1 rows) must have a rule")
    assert arithmetic.startswith("data source 'arithmetic' (2 rows) must have ground truths")
    assert "the first without is prompt 1 ('question 1') with ''" in arithmetic
    assert gsm8k.startswith("data source 'gsm8k' (1 rows) must have ground truths")
