"""Metrics over several responses to a prompt, worked by hand and against every choice of K."""

import math
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from mindspeed_rlxf.config.schema import ValidationConfig
from mindspeed_rlxf.reporting.metric_table import validation_score
from mindspeed_rlxf.trainer.validation import Scored, best_at_k, majority_score, measure, pass_at_k


@settings(max_examples=50, deadline=None)
@given(
    scores=st.lists(st.sampled_from([0.0, 1.0, -0.5, 2.5]), min_size=1, max_size=7), data=st.data()
)
def test_k_of_n_is_the_mean_over_every_choice(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    choices = list(combinations(scores, k))
    mean = sum(map(max, choices)) / len(choices)
    assert best_at_k(scores, k) == pytest.approx(mean)
    right = [score >= 1.0 for score in scores]
    chance = sum(map(any, combinations(right, k))) / len(choices)
    assert pass_at_k(len(scores), sum(right), k) == pytest.approx(chance)
    assert math.isnan(best_at_k([1.0, math.nan], 1))
    assert best_at_k([-math.inf, 1.0, 2.0], 2) == pytest.approx(5 / 3)


def test_the_most_frequent_answer_is_scored():
    assert majority_score(["7", "8", "8"], [1.0, 0.0, 0.0]) == 0.0
    assert majority_score(["7", "8", "7"], [1.0, 0.0, 0.5]) == 0.75, "the mean of its responses"
    # a tie of three answers: as if one of them were drawn
    assert majority_score(["7", "8", "9"], [1.0, 0.0, 0.5]) == 0.5
    assert majority_score(["7", "8", "7", "8", "9"], [1.0, 0.0, 1.0, 0.0, 9.0]) == 0.5
    assert majority_score([None, None, "7"], [0.0, 0.0, 1.0]) == 1.0, "nothing has no vote"
    assert majority_score([None, None], [0.0, 1.0]) == 0.5


def test_metrics_of_two_sources_by_hand():
    def response(score: float, answer: str | None) -> Scored:
        return Scored(score, 4, {"accuracy": score}, answer)

    groups = [
        [response(1.0, "7"), response(0.0, "8"), response(0.0, "8"), response(0.0, None)],
        [response(1.0, "7"), response(1.0, "7"), response(0.0, "9"), response(0.0, "3")],
        [response(0.0, "7")] * 4,
    ]
    keys = ValidationConfig(n_samples=4, do_sample=True)
    found = measure(groups, ["a", "a", "b/c"], keys)
    assert {name.removeprefix("val/a/"): v for name, v in found.items() if "b/c" not in name} == {
        "score": 3 / 8,
        "response_length": 4.0,
        "accuracy": 3 / 8,
        "mean@4": pytest.approx(3 / 8),
        "best@2": pytest.approx((3 / 6 + 5 / 6) / 2),  # pairs with a 1: 3 of 6, 5 of 6
        "best@4": 1.0,
        "maj@4": 0.5,  # 8 and 7
        "pass@1": pytest.approx(3 / 8),
        "pass@2": pytest.approx((3 / 6 + 5 / 6) / 2),
        "pass@4": 1.0,
    }
    names = {name.removeprefix("val/b/c/") for name in found if "b/c" in name}
    assert {*keys.metrics, "accuracy", "response_length"} == names
    assert found["val/b/c/maj@4"] == found["val/b/c/pass@4"] == 0.0


def test_responses_that_could_not_be_scored_are_left_out():
    lost = Scored(0.0, 4, {}, None, is_scored=False)
    groups = [
        [Scored(1.0, 4), lost, Scored(0.0, 4), Scored(1.0, 4)],
        [lost, Scored(1.0, 4), lost, lost],
    ]
    found = measure([*groups, [lost] * 4], ["a"] * 3, ValidationConfig(n_samples=4, do_sample=True))
    assert found["val/a/score"] == 3 / 4
    assert found["val/a/mean@4"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["val/a/best@2"] == found["val/a/pass@2"] == 1.0, "of the prompt with three"
    assert "val/a/best@4" not in found


def test_is_right_reads_the_accuracy_metric_or_the_score():
    assert Scored(0.1, 1).is_right(None) and not Scored(0.0, 1).is_right(None)
    assert not Scored(0.6, 1, {"format": 1.0, "acc": -0.5}).is_right(None)
    assert Scored(-1.0, 1, {"accuracy": 1.0}).is_right(None)
    assert Scored(0.5, 1, {"accuracy": 0.0}).is_right(0.5)
    assert not Scored(0.6, 1, {"mine": 0.6, "mine/acc": 0.0}).is_right(None)
    assert not Scored(math.nan, 1).is_right(0.5) and not Scored(math.nan, 1).is_right(None)


def test_the_best_checkpoint_is_that_of_one_source_or_of_the_mean():
    found = {"val/a/score": 0.5, "val/b/c/score": 1.0, "val/b/c/pass@1": 0.25, "timing/val": 9.0}
    assert validation_score(found, "score") == 0.75
    assert validation_score(found, "val/b/c/score") == 1.0
    assert validation_score(found, "pass@1") == 0.25
    assert validation_score({"timing/all": 1.0}, "score") is None
    assert validation_score({}, "val/a/score") is None
