"""Make experience from log-probs, values and scores (design, section 6).

Runs on the critic's ranks, or without a critic on the actor's. Each replica computes its own
samples; whitening sums over all replicas.
"""

from math import isfinite

import torch
from torch import Tensor

from mindspeed_rlxf.algorithms.advantages import overlong_penalty, shape_scores, token_rewards
from mindspeed_rlxf.algorithms.estimators import Rewarded
from mindspeed_rlxf.algorithms.kl import kl_per_token
from mindspeed_rlxf.algorithms.masked import AllReduce, masked_mean, masked_whiten
from mindspeed_rlxf.algorithms.slots import value_mask
from mindspeed_rlxf.config.enums import KlPenalty, OldLogProbs, Stage
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import (
    Experience,
    ExperienceInputs,
    LogProbsWithKl,
    RoleOutput,
    Rollouts,
    Scores,
    TokenRows,
    fit_columns,
)
from mindspeed_rlxf.roles.objectives import Objective
from mindspeed_rlxf.roles.reports import ExperienceReport, Summary, value_fit


class ExperienceMaker:
    """Computes rewards, advantages and returns for a replica's samples."""

    def __init__(
        self, config: RunConfig, objective: Objective, sum_over_replicas: AllReduce
    ) -> None:
        """Read the settings; `sum_over_replicas` sums a tensor over data-parallel ranks."""
        self.run, self.algorithm, self.objective = config, config.algorithm, objective
        self.sum_over_replicas = sum_over_replicas
        self.old_are_of_update = config.old_log_probs is OldLogProbs.AUTO
        full = self.algorithm.kl_penalty is KlPenalty.FULL  # measured with the reference's pass
        self.measures_kl = self.old_are_of_update and not full

    def make(self, inputs: ExperienceInputs) -> RoleOutput:
        """Compute rewards, advantages and returns; a collective over replicas.

        Rows: Experience; unused columns have width 0. Report: ExperienceReport. With a token log,
        also its rows.

        Raises:
            ValueError: Scores are NaN or inf, unless `nan_policy` is skip, or whitening got fewer
                than two tokens.
        """
        rollouts, width = inputs.rollouts, inputs.rollouts.response_ids.size(1)
        # Each role pads to the longest response that its own replica saw.
        given_old = rollouts.rollout_log_probs if inputs.old is None else inputs.old.log_probs
        old = None if self.old_are_of_update else fit_columns(given_old, width)
        ref = None if inputs.ref is None else fit_columns(inputs.ref.log_probs, width)
        kl = None  # [batch, response]
        if isinstance(inputs.ref, LogProbsWithKl):  # over the vocabulary
            kl = fit_columns(inputs.ref.kl, width)
        elif old is not None and ref is not None:
            kl = kl_per_token(old, ref, self.algorithm.kl_penalty)
        # A response is masked out if it, its greedy response or the other one of its pair could not
        # be scored for a cause that is not the response's.
        scored = inputs.scores.is_scored
        if inputs.greedy_scores is not None:
            scored = scored & inputs.greedy_scores.is_scored
        if self.run.training.stage is Stage.RAY_ONLINE_DPO:
            scored = scored.view(-1, 2).all(1).repeat_interleave(2)
        trained = rollouts.trained_mask & scored[:, None]
        zero = torch.zeros(trained.shape)
        given = self._make_rewarded(inputs, trained, zero if kl is None else kl * trained)
        estimate = self.objective.estimate(given)
        none = trained.new_zeros(len(trained), 0)
        reads_reference = self.objective.reads_reference or self.measures_kl
        experience = Experience(
            advantages=estimate.advantages.where(trained, 0.0),  # NaN too
            trained_mask=trained,
            old_log_probs=none.float() if old is None else old,
            ref_log_probs=none.float() if ref is None or not reads_reference else ref,
            returns=none.float() if estimate.returns is None else estimate.returns,
            values=none.float() if given.values is None else given.values,
            value_mask=none if given.values is None else given.value_mask,
        )
        report = _summarize(experience, given, kl, rollouts.trained_mask)
        token_rows = None
        if inputs.token_log is not None:
            token_rows = TokenRows(
                inputs.token_log,
                rollouts.sample_ids,
                rollouts.response_lengths,
                experience.advantages,
                kl,
                experience.values if experience.values.size(1) else None,
            )
        return RoleOutput(experience, report, token_rows)

    def _make_rewarded(self, inputs: ExperienceInputs, trained: Tensor, kl: Tensor) -> Rewarded:
        """Return the estimator input from trained [batch, response] and KL (0 if untrained).

        Rewards contain the KL penalty if the objective puts it there, and are whitened (without a
        mean shift) with `whiten_rewards`.
        """
        rollouts, algorithm = inputs.rollouts, self.algorithm
        mask = value_mask(
            trained,
            rollouts.response_mask,
            rollouts.has_eos,
            algorithm.score_position,
            inputs.slot_limit,
        )
        scores = self._shape_scores(rollouts, inputs.scores)
        kl_coef = inputs.kl_coef if self.objective.kl_in_reward else 0.0
        rewards = token_rewards(fit_columns(kl, mask.size(1)), scores, mask, kl_coef)
        if algorithm.whiten_rewards:
            rewards = masked_whiten(rewards, mask, self.sum_over_replicas, shift_mean=False)
        values, greedy = None, None
        if inputs.values is not None:
            values = fit_columns(inputs.values.values, mask.size(1)) * mask
        if inputs.greedy is not None and inputs.greedy_scores is not None:
            greedy = self._shape_scores(inputs.greedy, inputs.greedy_scores)
        return Rewarded(
            scores=scores,
            rewards=rewards,
            value_mask=mask,
            trained_mask=trained,
            values=values,
            greedy_scores=greedy,
            group_size=self.run.actor_rollout.n_samples_per_prompt,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            critic_lam=algorithm.critic_lam,
            lam_alpha=algorithm.lam_alpha,
        )

    def _shape_scores(self, rollouts: Rollouts, scores: Scores) -> Tensor:
        """Return scores [batch], scaled and clipped, minus penalties (missing EOS, length).

        Raises:
            ValueError: Scores are NaN or inf; with `nan_policy: skip` they become NaN instead.
        """
        given = zip(rollouts.sample_ids, scores.scores.tolist(), strict=True)
        wrong = [f"{score} for sample {i}" for i, score in given if not isfinite(score)]
        if wrong and self.run.training.nan_policy == "raise":
            raise ValueError(
                f"scores must be finite numbers, the reward gave {', '.join(wrong[:8])}; correct "
                "the reward, or set training.nan_policy=skip"
            )
        algorithm = self.algorithm
        score = shape_scores(scores.scores, algorithm.reward_scale, algorithm.reward_clip)
        score = score - algorithm.missing_eos_penalty * (~rollouts.has_eos)
        return score - overlong_penalty(
            rollouts.response_lengths,
            self.run.actor_rollout.max_new_tokens,
            algorithm.overlong_buffer_len,
            algorithm.overlong_penalty_factor,
        )


def _summarize(
    experience: Experience, given: Rewarded, kl: Tensor | None, generated: Tensor
) -> ExperienceReport:
    tokens, slots, scored = experience.trained_mask, experience.value_mask, given.is_scored
    has_values = bool(slots.numel())
    return ExperienceReport(
        kl=[] if kl is None else masked_mean(kl, generated, dim=1).tolist(),
        score=Summary.of(given.scores[scored]),
        rewards=Summary.of(given.rewards.sum(1)[scored]),
        advantages=Summary.of(experience.advantages[tokens]),
        returns=Summary.of(experience.returns[slots]) if has_values else None,
        values=Summary.of(experience.values[slots]) if has_values else None,
        fit=value_fit(experience.returns[slots], experience.values[slots]) if has_values else None,
        num_masked=len(scored) - int(scored.sum()),
    )
