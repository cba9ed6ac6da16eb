"""Experience from what the roles found out about the responses (design, section 6).

Made on the critic's ranks, or the actor's where there is no critic; each rank takes its own samples
and sums go over the replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from mindspeed_rlxf.algorithms.advantages import (
    estimate_gae,
    length_mask,
    rewards_to_go,
    slot_counts,
    token_rewards,
)
from mindspeed_rlxf.algorithms.groups import (
    dr_grpo_advantages,
    grpo_advantages,
    preference_of_pairs,
    rloo_advantages,
)
from mindspeed_rlxf.algorithms.kl import kl_per_token
from mindspeed_rlxf.algorithms.masked import AllReduce, masked_mean, masked_whiten
from mindspeed_rlxf.algorithms.scores import overlong_penalty, shape_scores
from mindspeed_rlxf.config.enums import AdvantageWhiten, AdvEstimator, KlIn, NanPolicy, Stage
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import (
    Experience,
    LogProbs,
    LogProbsWithKl,
    RoleOutput,
    Rollouts,
    Scores,
    Values,
    fit_columns,
)
from mindspeed_rlxf.roles.reports import ExperienceReport, Summary

GROUP_ADVANTAGES = {
    AdvEstimator.GRPO: grpo_advantages,
    AdvEstimator.DR_GRPO: dr_grpo_advantages,
    AdvEstimator.RLOO: rloo_advantages,
    AdvEstimator.REINFORCE_PLUS_PLUS_BASELINE: dr_grpo_advantages,  # whitened afterwards
}


@dataclass(frozen=True)
class _Rewarded:
    """Responses with their KL and rewards; `slots` are tokens and perhaps one more (design, 6)."""

    old_log_probs: Tensor  # [batch, response]
    ref_log_probs: Tensor  # [batch, response]
    response_mask: Tensor  # [batch, response]
    value_mask: Tensor  # [batch, slots]
    kl: Tensor  # [batch, response], 0 where masked
    score: Tensor  # [batch], penalties subtracted
    rewards: Tensor  # [batch, slots]


class ExperienceMaker:
    def __init__(self, config: RunConfig, sum_over_replicas: AllReduce) -> None:
        """sum_over_replicas: adds a small tensor up over the data-parallel ranks."""
        self.algorithm, self.actor = config.algorithm, config.actor_rollout
        self.skips = config.training.nan_policy is NanPolicy.SKIP
        self.prefers = config.training.stage is Stage.RAY_ONLINE_DPO
        self.sum_over_replicas = sum_over_replicas

    def with_values(
        self,
        rollouts: Rollouts,
        old: LogProbs | None,
        ref: LogProbs,
        values: Values,
        scores: Scores,
        kl_coef: float,
        slot_limit: int,
    ) -> RoleOutput:
        """GAE over the critic's values.

        old: recomputed log-probs, or None where the rollout's own are used
        slot_limit: slots that a response can have at most
        """
        found = self._rewarded(rollouts, old, ref, scores, kl_coef, slot_limit)
        mask = found.value_mask
        kept = fit_columns(values.values, mask.size(1)) * mask
        algorithm = self.algorithm
        advantages, returns = estimate_gae(
            found.rewards, kept, mask, algorithm.gamma, algorithm.lam
        )
        width = found.response_mask.size(1)
        return self._output(found, advantages[:, :width], returns, kept)

    def without_critic(
        self,
        rollouts: Rollouts,
        old: LogProbs | None,
        ref: LogProbs,
        scores: Scores,
        greedy: Rollouts | None,
        greedy_scores: Scores | None,
        kl_coef: float,
        slot_limit: int,
    ) -> RoleOutput:
        """Advantages from rewards alone; responses to a prompt stand next to each other.

        greedy, greedy_scores: for ReMax, the greedy response to the prompt of each sample
        """
        found = self._rewarded(rollouts, old, ref, scores, kl_coef, slot_limit)
        algorithm, mask = self.algorithm, found.response_mask
        if self.prefers:
            advantages = preference_of_pairs(found.score)[:, None] * mask
        elif algorithm.adv_estimator.discounts:
            returns = rewards_to_go(found.rewards, found.value_mask, algorithm.gamma)
            advantages = returns[:, : mask.size(1)]
            if greedy is not None and greedy_scores is not None:
                advantages = advantages - self._score(greedy, greedy_scores)[:, None]
        else:
            estimate = GROUP_ADVANTAGES[algorithm.adv_estimator]
            totals = estimate(found.rewards.sum(1), self.actor.n_samples_per_prompt)
            advantages = totals[:, None] * mask
        return self._output(found, advantages, None, None)

    def _rewarded(
        self,
        rollouts: Rollouts,
        old: LogProbs | None,
        ref: LogProbs,
        scores: Scores,
        kl_coef: float,
        slot_limit: int,
    ) -> _Rewarded:
        algorithm, width = self.algorithm, rollouts.response_ids.size(1)
        # Each role pads to the longest response that its own replica saw.
        old_log_probs = rollouts.rollout_log_probs if old is None else old.log_probs
        old_log_probs = fit_columns(old_log_probs, width)
        ref_log_probs = fit_columns(ref.log_probs, width)
        response_mask = length_mask(rollouts.response_lengths, width)
        slots = slot_counts(
            rollouts.response_lengths, rollouts.has_eos, algorithm.score_position, slot_limit
        )
        value_mask = length_mask(slots, width + 1)
        if isinstance(ref, LogProbsWithKl):
            kl = fit_columns(ref.kl, width)
        else:
            kl = kl_per_token(old_log_probs, ref_log_probs, algorithm.kl_penalty)
        kl = kl * response_mask
        score = self._score(rollouts, scores)
        in_reward = algorithm.kl_in is KlIn.REWARD and not self.prefers
        rewards = token_rewards(
            fit_columns(kl, width + 1), score, slots, kl_coef if in_reward else 0.0
        )
        if algorithm.whiten_rewards:
            rewards = masked_whiten(rewards, value_mask, self.sum_over_replicas, shift_mean=False)
        return _Rewarded(
            old_log_probs, ref_log_probs, response_mask, value_mask, kl, score, rewards
        )

    def _score(self, rollouts: Rollouts, scores: Scores) -> Tensor:
        """[batch] scores scaled, clipped, penalties subtracted; NaN where steps are skipped."""
        algorithm = self.algorithm
        given = scores.scores
        if self.skips:  # what is clipped would look like a number
            given = given.where(given.isfinite(), torch.nan)
        else:
            _check_finite(given, rollouts.sample_ids)
        score = shape_scores(given, algorithm.reward_scale, algorithm.reward_clip)
        score = score - algorithm.missing_eos_penalty * (~rollouts.has_eos)
        return score - overlong_penalty(
            rollouts.response_lengths,
            self.actor.max_new_tokens,
            algorithm.overlong_buffer_len,
            algorithm.overlong_penalty_factor,
        )

    def _output(
        self, found: _Rewarded, advantages: Tensor, returns: Tensor | None, values: Tensor | None
    ) -> RoleOutput:
        """returns, values: [batch, slots], None without a critic."""
        mask, whiten = found.response_mask, self.algorithm.advantage_whiten
        if whiten is AdvantageWhiten.BATCH and not self.prefers:
            advantages = masked_whiten(advantages, mask, self.sum_over_replicas)
        none = mask.new_zeros(len(mask), 0)
        in_loss = self.algorithm.kl_in is KlIn.LOSS or self.prefers
        experience = Experience(
            advantages=advantages * mask,
            response_mask=mask,
            old_log_probs=found.old_log_probs,
            ref_log_probs=found.ref_log_probs if in_loss else none.float(),
            returns=none.float() if returns is None else returns,
            values=none.float() if values is None else values,
            value_mask=none if values is None else found.value_mask,
        )
        return RoleOutput(experience, _report(experience, found))


def _check_finite(scores: Tensor, sample_ids: list[int]) -> None:
    """One score that is no number would spoil every advantage of the batch."""
    wrong = {i: s for i, s in zip(sample_ids, scores.tolist(), strict=True) if not isfinite(s)}
    if wrong:
        named = ", ".join(f"{score} for sample {i}" for i, score in list(wrong.items())[:8])
        raise ValueError(
            f"scores must be finite numbers, the reward gave {named}; correct the reward, or set "
            "training.nan_policy=skip"
        )


def _report(experience: Experience, found: _Rewarded) -> ExperienceReport:
    tokens, slots = experience.response_mask, experience.value_mask
    has_values = bool(slots.numel())
    return ExperienceReport(
        kl=masked_mean(found.kl, tokens, dim=1).tolist(),
        score=Summary.of(found.score),
        rewards=Summary.of(found.rewards.sum(1)),
        advantages=Summary.of(experience.advantages[tokens]),
        returns=Summary.of(experience.returns[slots]) if has_values else None,
        values=Summary.of(experience.values[slots]) if has_values else None,
    )
