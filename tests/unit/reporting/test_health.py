"""Health rules find the faults of recorded runs, and none in healthy runs."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_rlxf.config.enums import HealthRule
from mindspeed_rlxf.config.keys import known_keys
from mindspeed_rlxf.reporting.health_rules import (
    CLEAR,
    RULES,
    Finding,
    Health,
    rules_without_meaning,
)
from mindspeed_rlxf.reporting.jsonl import read_metrics

RECORDINGS = Path(__file__).parent / "recordings"
HEALTHY = ("demo", "golden_gae", "golden_grpo")
Metrics = dict[str, float | None]


def findings(name: str, health: Health | None = None) -> list[Finding]:
    """What is found in a recorded run."""
    health = health or Health()
    lines = read_metrics(RECORDINGS / f"{name}.jsonl")
    return [found for line in lines for found in health.check(*line)]


def made(values: Callable[[int], Metrics], count: int, health: Health | None = None) -> list[str]:
    """`iteration rule event` of what is found in made-up metrics of iterations from 1."""
    health = health or Health()
    found = [f for i in range(1, count + 1) for f in health.check(i, values(i))]
    return [f"{each.iteration} {each.rule} {each.event}" for each in found]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(name):
    assert sum(1 for _ in read_metrics(RECORDINGS / f"{name}.jsonl")) >= 20
    assert findings(name) == []


def test_a_far_too_high_learning_rate_without_kl_penalty_shows_four_illnesses():
    """PPO on the tiny task, kl_coef 0, lr 1e-2: KL over 1 from iteration 3, all cut from 6."""
    found = findings("far_too_high_learning_rate")
    assert [(each.iteration, each.rule) for each in found] == [
        (5, "kl_runaway"), (8, "all_cut"), (22, "entropy_collapse"),
        (30, "critic_explains_nothing"),
    ]  # fmt: skip
    kl, cut, entropy, _ = found
    assert kl.metric == "critic/kl" and kl.value == pytest.approx((4.893 + 7.663 + 7.553) / 3)
    assert "6.7 nats per token" in kl.text and kl.remedy.endswith("lower actor_rollout.lr")
    assert cut.value == pytest.approx((0.9688 + 0.7188 + 1 + 1 + 1) / 5)
    assert entropy.value < 0.02


def test_a_run_of_groups_that_forgets_the_task_has_equal_scores():
    """GRPO on the tiny task, kl_coef 0, lr 3e-3."""
    assert [each.rule for each in findings("grpo_without_reference")] == [
        "kl_runaway",
        "equal_scores",
    ]


def test_a_problem_is_found_once_and_ends_after_five_iterations_without_it():
    # The mean over five iterations is under 0.9 from iteration 11 on.
    cut = "response_length/truncated_fraction"
    found = made(lambda i: {cut: 1.0 if i <= 10 else 0.0}, 30)
    assert found == ["5 all_cut began", f"{10 + CLEAR} all_cut ended"]
    pauses = made(lambda i: {"critic/kl": 0.5 if i in (6, 12) else 2.0}, 14)
    assert pauses == ["3 kl_runaway began"]


def test_validation_that_falls_while_training_rises_is_found():
    def run(i: int, trend: float, validated: float) -> Metrics:
        metrics: Metrics = {"critic/score/mean": 0.5 + trend * i}
        if i % 5 == 0:
            metrics["val/a/score"] = 0.4 + validated * i
            metrics["val/b/score"] = 0.4
        return metrics

    # Validated at 5, 10, 15, 20: the third fall is that of iteration 20.
    fell = ["20 validation_falls began"]
    assert made(lambda i: run(i, 0.01, -0.01), 20) == fell
    broken = {"val/c/score": math.nan}
    assert made(lambda i: {**run(i, 0.01, -0.01), **broken}, 20) == fell, "c is left out"
    assert made(lambda i: run(i, -0.01, -0.01), 20) == [], "both fall: the task is lost, not gamed"
    assert made(lambda i: run(i, 0.01, 0.01), 40) == []
    assert made(lambda i: run(i, 0.01, -1e-5), 40) == [], "a fall within noise"


def test_a_plateau_is_found_after_five_validations_without_a_new_best():
    """Scores at 5, 10, ... are 1, 2, 3, 3, 3, 2, 3, 3: the fifth that is not over 3 is at 40."""
    scores = [1, 2, 3, 3, 3, 2, 3, 3, 3]

    def found(stop_on: tuple[HealthRule, ...]) -> list[tuple[int, str, bool]]:
        health = Health(stop_on)
        events = []
        for i in range(1, 46):
            metrics = {} if i % 5 else {"val/a/score": scores[i // 5 - 1]}
            events += health.check(i, metrics)
        return [(each.iteration, each.rule, each.stops) for each in events]

    assert found((HealthRule.VALIDATION_PLATEAU,)) == [(40, "validation_plateau", True)]
    assert found(()) == [], "a run that has learnt all is not ill"


FIT, GAP, KL = "critic/explained_variance", "rollout/log_prob_gap_mean", "critic/kl"


@pytest.mark.parametrize(("values", "count", "found"), [
    (lambda i: {FIT: -0.2}, 40, ["30 critic_explains_nothing began"]),
    (lambda i: {FIT: -5.0 if i < 15 else 0.2}, 60, []),  # it learns
    (lambda i: {GAP: 0.06}, 4, ["3 log_prob_gap began"]),
    (lambda i: {GAP: 0.001 if i < 10 else 0.02}, 12, ["11 log_prob_gap began"]),
    (lambda i: {GAP: 1e-7 if i < 10 else 1e-5}, 20, []),  # rounding may grow
    (lambda i: {GAP: 0.04}, 20, []),
    (lambda i: {KL: 8.0}, 9, ["3 kl_runaway began"]),
])  # fmt: skip
def test_a_critic_worse_than_a_constant_and_a_gap_of_log_probs_are_found(values, count, found):
    assert made(values, count) == found


def test_an_adaptive_target_raises_the_limit_of_the_kl():
    assert made(lambda i: {KL: 8.0}, 9, Health(kl_limit=12.0)) == []


def test_a_gap_of_log_probs_is_no_finding_where_weights_are_older():
    excluded = rules_without_meaning(max_staleness=1)
    assert made(lambda i: {GAP: 0.06, KL: 8.0}, 9, Health(excluded=excluded)) == [
        "3 kl_runaway began"
    ]
    assert rules_without_meaning(max_staleness=0) == ()


def test_a_rank_that_lags_is_found_after_ten_iterations_in_a_row():
    def run(i: int, rank: float, skew: float = 0.4, gen_s: float = 5.0) -> Metrics:
        return {
            "slowest_rank/gen": rank, "skew/gen": skew, "timing/gen": gen_s, "timing/all": 10.0,
            "slowest_rank/adv": 7.0, "skew/adv": 3.0, "timing/adv": 0.1,
        }  # fmt: skip

    health = Health()
    assert made(lambda i: run(i, 3.0), 12, health) == ["10 lagging_rank began"]
    assert "rank 3 was the slowest of gen" in health.active["lagging_rank"].text
    assert made(lambda i: run(i, 3.0 if i % 9 else 2.0), 40) == [], "it is not always the same"
    assert made(lambda i: run(i, 3.0, skew=0.1), 40) == []
    assert made(lambda i: run(i, 3.0, gen_s=0.5), 40) == [], "the phase takes no time"


def test_a_resumed_run_finds_what_an_uninterrupted_one_finds():
    lines = list(read_metrics(RECORDINGS / "far_too_high_learning_rate.jsonl"))
    for cut in (4, 8, 25):
        resumed = Health()
        for line in lines[:cut]:
            resumed.check(*line)
        rest = [found for line in lines[cut:] for found in resumed.check(*line)]
        assert rest == [f for f in findings("far_too_high_learning_rate") if f.iteration > cut]


def test_every_rule_has_a_remedy_whose_keys_exist():
    assert RULES.keys() == set(HealthRule)
    known = known_keys()

    words = [w.strip(".,;:`()") for _, text in RULES.values() for w in re.split("[ =]", text)]
    named = [(w.rpartition(".")[0], w.rpartition(".")[2]) for w in words]
    named = [(section, key) for section, key in named if section in known]
    assert len(named) > 8 and [f"{s}.{k}" for s, k in named if k not in known[s]] == []
