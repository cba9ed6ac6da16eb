"""Make experience from log-probs, values and scores of the responses (design, section 6).

On the critic's ranks, or without a critic on the actor's. Each replica computes its own samples;
whitening sums over all replicas.
"""

from math import isfinite

import torch
from torch import Tensor

from mindspeed_rlxf.algorithms.advantages import overlong_penalty, shape_scores, token_rewards
from mindspeed_rlxf.algorithms.estimators import Estimate, Rewarded
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
from mindspeed_rlxf.roles.reports import ExperienceReport, Summary, ValueFit


class ExperienceMaker:
    """Computes rewards, advantages and returns of the samples of a replica."""

    def __init__(
        self, config: RunConfig, objective: Objective, sum_over_replicas: AllReduce
    ) -> None:
        """Read the settings of the rewards.

        objective: estimates the advantages
        sum_over_replicas: returns a tensor's sum over the data-parallel ranks
        """
        self.algorithm, self.objective = config.algorithm, objective
        self.max_new_tokens = config.actor_rollout.max_new_tokens
        self.group_size = config.actor_rollout.n_samples_per_prompt
        self.pairs = config.training.stage is Stage.RAY_ONLINE_DPO
        self.skips = config.training.nan_policy == "skip"
        self.sum_over_replicas = sum_over_replicas
        self.old_are_of_update = config.old_log_probs is OldLogProbs.AUTO
        full = self.algorithm.kl_penalty is KlPenalty.FULL  # measured with the reference's pass
        self.measures_kl = self.old_are_of_update and not full

    def make(self, inputs: ExperienceInputs) -> RoleOutput:
        """Compute rewards, advantages and returns; a collective over replicas.

        The rewards contain the KL penalty if the objective puts it there.
        Rows: Experience. Report: ExperienceReport. With a token log also the rows of that log.
        Errors: ValueError for scores that are NaN or inf, unless `nan_policy` is skip, and for
        whitening over fewer than two tokens.
        """
        rollouts, width = inputs.rollouts, inputs.rollouts.response_ids.size(1)
        # Each role pads to the longest response that its own replica saw.
        given_old = rollouts.rollout_log_probs if inputs.old is None else inputs.old.log_probs
        old = None if self.old_are_of_update else fit_columns(given_old, width)
        ref = None if inputs.ref is None else fit_columns(inputs.ref.log_probs, width)
        kl = self._compute_kl(inputs, old, ref)
        trained = rollouts.trained_mask & self._find_scored(inputs)[:, None]
        zero = torch.zeros(trained.shape)
        given = self._make_rewarded(inputs, trained, zero if kl is None else kl * trained)
        estimate = self.objective.estimate(given)
        experience = self._make_experience(given, estimate, old, ref)
        report = _summarize(experience, given, kl, rollouts.trained_mask)
        return RoleOutput(experience, report, _make_token_rows(inputs, experience, kl))

    def _compute_kl(
        self, inputs: ExperienceInputs, old: Tensor | None, ref: Tensor | None
    ) -> Tensor | None:
        """Return [batch, response]: the KL of each token, by `kl_penalty`.

        If the reference has computed the KL over the vocabulary, returns that, old log-probs or
        not; else None without old or reference log-probs.
        """
        if isinstance(inputs.ref, LogProbsWithKl):
            return fit_columns(inputs.ref.kl, inputs.rollouts.response_ids.size(1))
        if old is None or ref is None:
            return None
        return kl_per_token(old, ref, self.algorithm.kl_penalty)

    def _find_scored(self, inputs: ExperienceInputs) -> Tensor:
        """Return [batch] bool: False = the response is masked out of advantages and losses.

        It, its greedy response, or in online DPO the other response of its pair, could not be
        scored for a cause that is not the response's.
        """
        scored = inputs.scores.is_scored
        if inputs.greedy_scores is not None:
            scored = scored & inputs.greedy_scores.is_scored
        return scored.view(-1, 2).all(1).repeat_interleave(2) if self.pairs else scored

    def _make_rewarded(self, inputs: ExperienceInputs, trained: Tensor, kl: Tensor) -> Rewarded:
        """Return the input of the advantage estimator: rewards per slot, masks, values, scores.

        The rewards contain the KL penalty if the objective puts it there, and are whitened (without
        a shift of the mean) with `whiten_rewards`. Values and greedy scores are None if not given.

        trained: [batch, response] bool
        kl:      [batch, response], 0 where not trained
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
            group_size=self.group_size,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            critic_lam=algorithm.critic_lam,
            lam_alpha=algorithm.lam_alpha,
        )

    def _shape_scores(self, rollouts: Rollouts, scores: Scores) -> Tensor:
        """Return [batch]: scores, scaled and clipped, less the penalties (missing EOS, length).

        Errors: ValueError for NaN or inf; with `nan_policy: skip` they give NaN.
        """
        if not self.skips:
            _check_finite(scores.scores, rollouts.sample_ids)
        algorithm = self.algorithm
        score = shape_scores(scores.scores, algorithm.reward_scale, algorithm.reward_clip)
        score = score - algorithm.missing_eos_penalty * (~rollouts.has_eos)
        return score - overlong_penalty(
            rollouts.response_lengths,
            self.max_new_tokens,
            algorithm.overlong_buffer_len,
            algorithm.overlong_penalty_factor,
        )

    def _make_experience(
        self, given: Rewarded, estimate: Estimate, old: Tensor | None, ref: Tensor | None
    ) -> Experience:
        """Return the Experience of these parts; columns that the run does not need have width 0.

        Advantages are set to 0 at tokens that are not trained; returns stay as they are.
        """
        trained = given.trained_mask
        none = trained.new_zeros(len(trained), 0)
        reads_reference = self.objective.reads_reference or self.measures_kl
        return Experience(
            advantages=estimate.advantages.where(trained, 0.0),  # NaN too
            trained_mask=trained,
            old_log_probs=none.float() if old is None else old,
            ref_log_probs=none.float() if ref is None or not reads_reference else ref,
            returns=none.float() if estimate.returns is None else estimate.returns,
            values=none.float() if given.values is None else given.values,
            value_mask=none if given.values is None else given.value_mask,
        )


def _check_finite(scores: Tensor, sample_ids: list[int]) -> None:
    """Raise ValueError, naming the first 8 such samples, if a score is NaN or inf."""
    wrong = {i: s for i, s in zip(sample_ids, scores.tolist(), strict=True) if not isfinite(s)}
    if wrong:
        named = ", ".join(f"{score} for sample {i}" for i, score in list(wrong.items())[:8])
        raise ValueError(
            f"scores must be finite numbers, the reward gave {named}; correct the reward, or set "
            "training.nan_policy=skip"
        )


def _make_token_rows(
    inputs: ExperienceInputs, experience: Experience, kl: Tensor | None
) -> TokenRows | None:
    """Return what the token log gets: ids, response lengths, advantages, KL, values; no copy.

    None without a token log. Values are None without a critic.
    kl: [batch, response] or None
    """
    if inputs.token_log is None:
        return None
    rollouts = inputs.rollouts
    return TokenRows(
        inputs.token_log,
        rollouts.sample_ids,
        rollouts.response_lengths,
        experience.advantages,
        kl,
        experience.values if experience.values.size(1) else None,
    )


def _summarize(
    experience: Experience, given: Rewarded, kl: Tensor | None, generated: Tensor
) -> ExperienceReport:
    """Return summaries of a replica's experience for the metrics.

    `rewards` is of their sum per response, `advantages` of trained tokens. `returns`, `values`
    and `fit` are of the slots, None without a critic. All leave out responses that are not scored.
    kl:        [batch, response], reported as a list of each response's mean over its generated
               tokens; None = not computed, reported as []
    generated: [batch, response] bool
    """
    tokens, slots, scored = experience.trained_mask, experience.value_mask, given.is_scored
    has_values = bool(slots.numel())
    return ExperienceReport(
        kl=[] if kl is None else masked_mean(kl, generated, dim=1).tolist(),
        score=Summary.of(given.scores[scored]),
        rewards=Summary.of(given.rewards.sum(1)[scored]),
        advantages=Summary.of(experience.advantages[tokens]),
        returns=Summary.of(experience.returns[slots]) if has_values else None,
        values=Summary.of(experience.values[slots]) if has_values else None,
        fit=ValueFit.of(experience.returns[slots], experience.values[slots])
        if has_values
        else None,
        num_masked=len(scored) - int(scored.sum()),
    )
