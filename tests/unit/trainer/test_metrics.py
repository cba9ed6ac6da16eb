"""Metrics of an iteration by the names of the run directory's contract."""

import math
from dataclasses import replace

import pytest
import torch

from mindspeed_rlxf.roles.reports import (
    ExperienceReport,
    FailedSample,
    GenerateReport,
    LogProbReport,
    ResponseLengths,
    ScoreReport,
    Summary,
    UpdateReport,
    explained_variance,
    value_fit,
)
from mindspeed_rlxf.trainer.metrics import (
    experience_metrics,
    group_metrics,
    log_prob_metrics,
    rollout_metrics,
    score_metrics,
    source_metrics,
    staleness_metrics,
    update_metrics,
    wait_metrics,
)


def test_lengths_are_over_all_samples():
    lengths = ResponseLengths([4, 6, 2], [1, 9, 5], [True, False, True])
    assert rollout_metrics(lengths) == {
        "prompt_length/mean": 4, "prompt_length/max": 6, "prompt_length/min": 2,
        "response_length/mean": 5, "response_length/max": 9, "response_length/min": 1,
        "response_length/p50": 5, "response_length/p90": 9,
        "response_length/eos_fraction": pytest.approx(2 / 3),
        "response_length/truncated_fraction": pytest.approx(1 / 3),
    }  # fmt: skip


def test_the_log_prob_gap_is_a_mean_over_tokens():
    gaps = [Summary.of(torch.tensor([0.1, 0.3])), Summary(1, 1, 1, 1)]
    expected = {"rollout/log_prob_gap_mean": pytest.approx(1.4 / 3), "rollout/log_prob_gap_max": 1}
    assert log_prob_metrics([LogProbReport(gap) for gap in gaps]) == expected
    weights = Summary.of(torch.tensor([0.5, 1.5]))
    assert log_prob_metrics([LogProbReport(gap, weights) for gap in gaps]) == {
        **expected, "rollout/is_weight/mean": 1.0, "rollout/is_weight/max": 1.5,
        "rollout/is_weight/min": 0.5,
    }  # fmt: skip


def test_staleness_is_a_mean_over_tokens_and_that_of_the_oldest_one():
    """Versions 3 and 5 of two tokens each, then 6 of one; trained by weights 7."""
    replicas = [
        GenerateReport([1], [4], [True], 0, 0, 0, 0.0, "", [3], [4.0]),
        GenerateReport([1], [1], [True], 0, 0, 0, 0.0, "", [6], [6.0]),
    ]
    assert staleness_metrics(replicas, 7) == {
        "staleness/mean": pytest.approx((4 + 4 + 2 + 2 + 1) / 5), "staleness/max": 4.0,
    }  # fmt: skip


@pytest.mark.parametrize(("generated", "waits"), [(12.0, (2.0, 0.0)), (7.0, (0.0, 3.0))])
def test_the_earlier_one_of_generation_and_training_waits(generated, waits):
    assert (*wait_metrics(generated, 10.0).values(),) == waits


def test_failed_samples_are_counted_by_cause_and_left_out_of_the_parts():
    parts = [{"mine": 1.0}, {}, {"mine": 0.5, "mine/length": 4.0}, {}]
    late, wrong = FailedSample(8, "timeout", ""), FailedSample(9, "wrong_result", "")
    assert score_metrics(ScoreReport([1.0, 0.0, 0.5, 0.0], parts, [None, late, None, wrong])) == {
        "reward/mine": 0.75, "reward/mine/length": 4.0, "reward/failed": 2.0,
        "reward/failed_timeout": 1.0, "reward/failed_wrong_result": 1.0,
    }  # fmt: skip
    assert score_metrics(ScoreReport([1.0], [{"mine": 1.0}], [None]))["reward/failed"] == 0.0


def experience(kl: list[float], *numbers: float) -> ExperienceReport:
    summary = Summary.of(torch.tensor(numbers))
    return ExperienceReport(kl, summary, summary, summary, summary, summary)


def test_kl_is_a_mean_over_the_samples_of_all_replicas():
    reports = [experience([0.2], 1.0), experience([0.4, 0.6], -3.0, 5.0)]
    metrics = experience_metrics(reports, kl_coef=0.05)
    assert metrics["critic/kl"] == pytest.approx(0.4) and metrics["critic/kl_coeff"] == 0.05
    for name in ("score", "rewards", "advantages", "returns", "values"):
        values = [metrics[f"critic/{name}/{end}"] for end in ("mean", "max", "min")]
        assert values == [1.0, 5.0, -3.0], name
    assert len(metrics) == 2 + 15


def test_update_metrics_are_means_over_steps():
    steps = [{"pg_loss": 0.5, "grad_norm": 1.0}, {"pg_loss": -0.1, "grad_norm": 3.0}]
    metrics = update_metrics("actor", UpdateReport(steps, lr=1e-6))
    assert metrics == {
        "actor/pg_loss": pytest.approx(0.2),
        "actor/pg_loss_abs": pytest.approx(0.3),  # |0.5| and |-0.1|
        "actor/grad_norm": 2.0,
        "actor/lr": 1e-6,
    }
    critic = update_metrics("critic", UpdateReport([{"vf_loss": 2.0}], lr=1e-5))
    assert critic == {"critic/vf_loss": 2.0, "critic/lr": 1e-5}


def test_skipped_steps_are_counted_and_in_no_mean():
    nan = math.nan
    steps = [
        {"pg_loss": 0.5, "grad_norm": 1.0, "skipped_steps": 0.0},
        {"pg_loss": nan, "grad_norm": nan, "skipped_steps": 1.0},
    ]
    metrics = update_metrics("actor", UpdateReport(steps, lr=1.0))
    assert (metrics["actor/pg_loss"], metrics["actor/skipped_steps"]) == (0.5, 1.0)
    assert metrics["actor/pg_loss_abs"] == 0.5 and metrics["actor/grad_norm"] == 1.0
    none = update_metrics("actor", UpdateReport(steps[1:], lr=1.0))
    assert none["actor/skipped_steps"] == 1.0 and math.isnan(none["actor/pg_loss"])


def test_scores_and_parts_are_averaged_by_data_source():
    parts = [{"accuracy": 1.0}, {"accuracy": 0.0}, {"format": 0.5}, {}]
    late = FailedSample(8, "timeout", "")
    report = ScoreReport([1.0, 0.0, 0.5, 9.0], parts, [None, None, None, late])
    assert source_metrics(report, ["a", "a", "b/c", "b/c"]) == {
        "train/a/score": 0.5, "train/a/accuracy": 0.5, "train/b/c/score": 0.5,
        "train/b/c/format": 0.5,
    }  # fmt: skip
    assert source_metrics(ScoreReport([2.0]), ["a"]) == {"train/a/score": 2.0}


def test_groups_with_equal_scores_are_counted_where_there_are_groups():
    report = ScoreReport([1.0, 1.0, 0.0, 1.0])
    assert group_metrics(report, 2) == {"rollout/equal_score_groups": 0.5}
    assert group_metrics(report, 1) == {}
    lost = FailedSample(8, "remote", "", is_outside=True)
    report = replace(report, failures=[None, None, lost, None])
    assert group_metrics(report, 2) == {"rollout/equal_score_groups": 1.0}


def test_the_explained_variance_is_that_of_all_slots_at_once():
    returns = torch.tensor([1.0, 2.0, 4.0, 9.0])
    values = torch.tensor([1.5, 2.5, 3.0, 6.0])
    parts = [value_fit(returns[:1], values[:1]), value_fit(returns[1:], values[1:])]
    expected = 1 - (returns - values).var(unbiased=False) / returns.var(unbiased=False)
    assert explained_variance(parts) == pytest.approx(float(expected))
    shifted = [value_fit(returns, returns + 3.0)]
    assert explained_variance(shifted) == pytest.approx(1.0)
    assert math.isnan(explained_variance([value_fit(torch.ones(3), values[:3])]))
    assert math.isnan(explained_variance([value_fit(torch.ones(0), torch.ones(0))]))
