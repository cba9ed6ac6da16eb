"""Metrics of log-prob gaps and KL, measured in the update if no pass before it computes them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from mindspeed_rlxf.algorithms.kl import kl_per_token
from mindspeed_rlxf.config.enums import KlPenalty
from mindspeed_rlxf.data.batch import Experience, Rollouts, fit_columns
from mindspeed_rlxf.engine.protocol import LossOutput, Mean, PolicyStep, TokenLogProbs


def measure_differences(
    step: PolicyStep, rollouts: Rollouts, experience: Experience, kl_penalty: KlPenalty
) -> PolicyStep:
    """Return a copy of the step whose loss reports two more metrics; its value is the same.

    `rollout/log_prob_gap_mean`: mean over trained tokens of |log-prob - log-prob of generation|
    `critic/kl`: KL to the reference, mean over samples of their mean per trained token; left out
    if the experience has no log-probs of the reference
    The log-probs are those before the optimizer step.
    """

    def loss(rows: list[int], tokens: TokenLogProbs) -> LossOutput:
        output = step.loss(rows, tokens)
        mask = experience.trained_mask[rows]
        log_probs = tokens.log_probs.detach().cpu().float()
        rollout = fit_columns(rollouts.rollout_log_probs, mask.size(1))[rows][mask]
        gaps = (log_probs - rollout).abs()
        found = {"rollout/log_prob_gap_mean": Mean.of(gaps, gaps.numel())}
        if experience.ref_log_probs.size(1):
            kl = kl_per_token(log_probs, experience.ref_log_probs[rows][mask], kl_penalty)
            means = _row_means(kl, mask)
            found["critic/kl"] = Mean.of(means, len(means))
        return replace(output, metrics=output.metrics | found)

    return replace(step, loss=loss)


def _row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row's values, for the rows that have any.

    values: [tokens], those where `mask` [rows, response] is True, row after row
    """
    placed = values.new_zeros(mask.shape)
    placed[mask] = values
    present = mask.any(1)
    return placed[present].sum(1) / mask[present].sum(1)
