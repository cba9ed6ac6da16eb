"""Policy objectives (each algorithm's advantages and loss), and the experience for them.

The critic's ranks, or without a critic the actor's, make experience from log-probs, values and
scores; the actor's ranks compute the loss. Each rank builds its own objective.
Each replica computes its own samples; whitening sums over all replicas.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import TypeAlias

import torch
from torch import Tensor

from mindspeed_rlxf.algorithms.advantages import overlong_penalty, shape_scores, token_rewards
from mindspeed_rlxf.algorithms.estimators import (
    ESTIMATORS,
    AdvantageInputs,
    Advantages,
    preference_of_pairs,
)
from mindspeed_rlxf.algorithms.kl import kl_per_token
from mindspeed_rlxf.algorithms.losses import (
    POLICY_LOSSES,
    ClipRange,
    LossOutput,
    Mean,
    clipped_policy_loss,
    copy_beside,
    normalised_loss,
    preference_loss,
    truncated_importance,
)
from mindspeed_rlxf.algorithms.masked import AllReduce, masked_mean, masked_whiten
from mindspeed_rlxf.algorithms.rejection import keep_near_rollout
from mindspeed_rlxf.algorithms.slots import value_mask
from mindspeed_rlxf.config.enums import AdvantageWhiten, KlPenalty, OldLogProbs, Role, Stage
from mindspeed_rlxf.config.registry import add_to
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.agent_record import find_record
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
from mindspeed_rlxf.engine.train_engine import PolicyStep, TokenLogProbs
from mindspeed_rlxf.roles.reports import ExperienceReport, Summary, value_fit


class ClippedObjective:
    """PPO and GSPO: advantages by `adv_estimator`, optional whitening, clipped loss.

    The probability ratio is per token (ppo) or per response (gspo). `kl_in_reward` puts the KL
    penalty into the token rewards; with `reads_reference` the loss reads the reference's log-probs.
    """

    def __init__(self, config: RunConfig, sum_over_replicas: AllReduce) -> None:
        """Read the clip range and where the KL term goes; a None bound is `clip_ratio`.

        The loss gets a KL term only if `kl_in` is loss and the run has a reference.
        `sum_over_replicas` returns a tensor's sum over the data-parallel ranks.
        """
        actor = config.actor_rollout
        self.actor, self.algorithm = actor, config.algorithm
        self.sum_over_replicas = sum_over_replicas
        self.policy_loss = POLICY_LOSSES.get(actor.policy_loss)  # None: PPO's
        self.kl_in_reward = config.algorithm.kl_in == "reward"
        self.reads_reference = config.algorithm.kl_in == "loss" and Role.REF in config.roles
        low, high = actor.clip_ratio_low, actor.clip_ratio_high
        self.clip = ClipRange(
            actor.clip_ratio if low is None else low,
            actor.clip_ratio if high is None else high,
            actor.clip_ratio_c,
            actor.covariance_fraction,
            actor.covariance_kl_coef,
        )

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Return advantages and returns by `algorithm.adv_estimator`; a collective.

        With `advantage_whiten: batch`, advantages are whitened over the batch on all replicas.
        """
        estimated = ESTIMATORS[self.algorithm.adv_estimator](inputs)
        advantages = estimated.advantages
        if self.algorithm.advantage_whiten is AdvantageWhiten.BATCH:
            advantages = masked_whiten(advantages, inputs.trained_mask, self.sum_over_replicas)
        return Advantages(advantages, estimated.returns)

    def step(
        self, rollouts: Rollouts, experience: Experience, rows: list[int], kl_coef: float
    ) -> PolicyStep:
        """Return the loss function and temperature for an optimizer step on these rows.

        A collective over replicas. `kl_coef` weighs the KL if it belongs to the loss.
        """
        advantages = experience.advantages
        if self.algorithm.advantage_whiten is AdvantageWhiten.MINIBATCH:
            advantages = torch.zeros_like(advantages)
            advantages[rows] = masked_whiten(
                experience.advantages[rows],
                experience.trained_mask[rows],
                self.sum_over_replicas,
            )
        # The clipped loss is proportional to the advantages, so they take the importance weights.
        threshold = self.algorithm.rollout_is_threshold
        if threshold is not None:
            rollout = fit_columns(rollouts.rollout_log_probs, advantages.size(1))
            low = self.algorithm.rollout_is_low
            ratio = truncated_importance(experience.old_log_probs, rollout, threshold, low)
            advantages = advantages * ratio
        loss = partial(self.loss, experience, advantages, kl_coef)
        has_own_loss = type(self).loss is not ClippedObjective.loss  # which may use the entropies
        trains_entropy = self.actor.entropy_coeff != 0 or has_own_loss
        return PolicyStep(loss, self.actor.logit_temperature, trains_entropy)

    def loss(
        self,
        experience: Experience,
        advantages: Tensor,
        kl_coef: float,
        rows: list[int],
        tokens: TokenLogProbs,
    ) -> LossOutput:
        """Compute a micro-batch's clipped policy loss - entropy bonus + KL loss, and metrics.

        `advantages` are [all rows, response]; `tokens` have log-probs and entropy for the trained
        tokens in the micro-batch's `rows`, row after row. Without old log-probs (width 0) the ratio
        is 1.
        """
        mask = experience.trained_mask[rows]
        log_probs, entropy = tokens

        def of_tokens(column: Tensor) -> Tensor:
            return copy_beside(log_probs, column[rows][mask])

        lengths = mask.sum(1)
        old = log_probs.detach()
        if experience.old_log_probs.size(1):
            old = of_tokens(experience.old_log_probs)
        of_trained = of_tokens(advantages)
        if self.policy_loss is None:
            token = clipped_policy_loss(log_probs, old, of_trained, self.clip)
        else:
            token = self.policy_loss(log_probs, old, of_trained, self.clip, lengths)
        loss = token.loss
        summands = {"pg_loss": token.loss}
        if self.actor.entropy_coeff:
            loss = loss - self.actor.entropy_coeff * entropy
        if self.reads_reference:
            ref = of_tokens(experience.ref_log_probs)
            summands["kl_loss"] = kl_per_token(log_probs, ref, self.algorithm.kl_penalty)
            loss = loss + kl_coef * summands["kl_loss"]
        per_token = {"pg_clipfrac": token.clipped, "ppo_kl": old - log_probs, "entropy": entropy}
        return normalised_loss(
            loss,
            lengths,
            self.algorithm.loss_normalizer,
            self.actor.max_new_tokens,
            summands,
            per_token,
        )


class PairObjective:
    """Online DPO: the loss prefers the better response to each prompt."""

    kl_in_reward, reads_reference = False, True

    def __init__(self, config: RunConfig) -> None:
        self.actor = config.actor_rollout

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Return advantage 1 for tokens in a pair's better response, -1 in the worse, 0 if equal.

        NaN if a score in the pair is NaN. No returns.
        """
        return Advantages(preference_of_pairs(inputs.scores)[:, None] * inputs.trained_mask)

    def step(
        self, rollouts: Rollouts, experience: Experience, rows: list[int], kl_coef: float
    ) -> PolicyStep:
        """Return the loss function and temperature for an optimizer step."""
        loss = partial(self.loss, experience)
        return PolicyStep(loss, self.actor.logit_temperature, trains_entropy=False)

    def loss(self, experience: Experience, rows: list[int], tokens: TokenLogProbs) -> LossOutput:
        """Return the DPO loss summed over a micro-batch's pairs, the pair count, and metrics.

        A pair with equal scores has loss 0 and counts only in the entropy; `dpo_decided` is the
        fraction with unequal scores. A NaN score gives a NaN loss. A pair without trained tokens
        could not be scored and does not count. A pair's two `rows` are adjacent; `tokens` follow
        them.
        """
        mask = experience.trained_mask[rows]
        log_probs, entropy = tokens
        ref = copy_beside(log_probs, experience.ref_log_probs[rows][mask])
        lengths = mask.sum(1).tolist()
        ratios = torch.stack([row.sum() for row in (log_probs - ref).split(lengths)])
        first, second = ratios.view(-1, 2).unbind(1)
        # The preference of a pair is the advantage of its first response at any trained token.
        at = mask.long().argmax(1, keepdim=True)
        signs_on_host = experience.advantages[rows].gather(1, at).view(-1, 2)[:, 0]
        num_decided = int((signs_on_host != 0).sum())
        sign = copy_beside(log_probs, signs_on_host)
        chosen = torch.where(sign < 0, second, first)
        rejected = torch.where(sign < 0, first, second)
        decided = (sign != 0).float()
        beta = self.actor.dpo_beta
        loss = preference_loss(chosen, rejected, beta, self.actor.dpo_loss_type) * decided
        loss = loss + 0.0 * sign
        pairs = int(mask.any(1).sum()) // 2
        metrics = {
            "dpo_loss": Mean.of(loss, num_decided),
            "dpo_accuracy": Mean.of((chosen > rejected) * decided, num_decided),
            "dpo_margin": Mean.of((chosen - rejected) * decided * beta, num_decided),
            "dpo_decided": Mean.of(decided, pairs),
            "entropy": Mean.of(entropy, len(entropy)),
        }
        return LossOutput(loss.sum(), pairs, metrics)


Objective: TypeAlias = ClippedObjective | PairObjective
"""The advantages and the loss of one algorithm."""


ObjectiveFactory: TypeAlias = Callable[[RunConfig, AllReduce], Objective]
OBJECTIVES: dict[str, ObjectiveFactory] = {}
"""Value of `algorithm.objective` -> a plugin's objective."""


def register_objective(name: str) -> Callable[[ObjectiveFactory], ObjectiveFactory]:
    """Return a decorator that adds an objective to OBJECTIVES; ValueError if the name is taken.

    It has `estimate`, `step`, `kl_in_reward` and `reads_reference` of `ClippedObjective`, whose
    subclass it may be.
    """
    return add_to(OBJECTIVES, name, "objective", "objective")


def make_objective(config: RunConfig, sum_over_replicas: AllReduce) -> Objective:
    """Return the plugin's objective, pair preferences for online DPO, or the clipped objective.

    `sum_over_replicas` returns a tensor's sum over the data-parallel ranks.
    """
    if config.algorithm.objective is not None:
        return OBJECTIVES[config.algorithm.objective](config, sum_over_replicas)
    if config.training.stage is Stage.RAY_ONLINE_DPO:
        return PairObjective(config)
    return ClippedObjective(config, sum_over_replicas)


class AdvantageComputer:
    """Computes rewards, advantages and returns for a replica's samples."""

    def __init__(
        self, config: RunConfig, objective: Objective, sum_over_replicas: AllReduce
    ) -> None:
        """Read the settings; `sum_over_replicas` sums a tensor over data-parallel ranks."""
        self.run = config
        self.algorithm = config.algorithm
        self.objective = objective
        self.sum_over_replicas = sum_over_replicas
        self.uses_current_log_probs_as_old = config.old_log_probs is OldLogProbs.AUTO
        full = self.algorithm.kl_penalty is KlPenalty.FULL  # measured with the reference's pass
        self.measures_kl = self.uses_current_log_probs_as_old and not full

    def make(self, inputs: ExperienceInputs) -> RoleOutput:
        """Compute rewards, advantages and returns; a collective over replicas.

        Rows: Experience; unused columns have width 0. Report: ExperienceReport. With a token log,
        also its rows.

        Raises:
            ValueError: Scores are NaN or inf, unless `nan_policy` is skip, or whitening got fewer
                than two tokens.
        """
        rollouts = inputs.rollouts
        # Each role pads to the longest response that its own replica saw.
        width = rollouts.response_ids.size(1)
        old = None
        if not self.uses_current_log_probs_as_old:
            old = rollouts.rollout_log_probs
            if inputs.old is not None:
                old = inputs.old.log_probs
            old = fit_columns(old, width)
        ref = None if inputs.ref is None else fit_columns(inputs.ref.log_probs, width)
        kl = None  # [batch, response]
        if isinstance(inputs.ref, LogProbsWithKl):  # over the vocabulary
            kl = fit_columns(inputs.ref.kl, width)
        elif old is not None and ref is not None:
            kl = kl_per_token(old, ref, self.algorithm.kl_penalty)
        # A response is masked out if it, its greedy response or the other one of its pair could not
        # be scored for a cause that is not the response's, or if its agent has failed.
        scored = inputs.scores.is_scored & rollouts.trained_mask.any(1)
        if inputs.greedy is not None and inputs.greedy_scores is not None:
            scored = scored & inputs.greedy_scores.is_scored & inputs.greedy.trained_mask.any(1)
        if self.run.training.stage is Stage.RAY_ONLINE_DPO:
            scored = scored.view(-1, 2).all(1).repeat_interleave(2)
        trained = rollouts.trained_mask & scored[:, None]
        trained_kl = torch.zeros(trained.shape) if kl is None else kl * trained
        advantage_inputs = self._make_advantage_inputs(inputs, trained, trained_kl)
        estimated = self.objective.estimate(advantage_inputs)
        if self.algorithm.mask_truncated:
            trained = trained & rollouts.has_eos[:, None]
        rejected = None
        if self.algorithm.rollout_rejection:
            assert old is not None, "compared with the rollout's"
            log_ratio = old - fit_columns(rollouts.rollout_log_probs, width)
            kept = keep_near_rollout(log_ratio, trained, self.algorithm.rollout_rejection)
            rejected = Summary.of((~kept)[trained])
            trained = kept
        none = trained.new_zeros(len(trained), 0)
        reads_reference = self.objective.reads_reference or self.measures_kl
        values = advantage_inputs.values
        experience = Experience(
            advantages=estimated.advantages.where(trained, 0.0),  # NaN too
            trained_mask=trained,
            old_log_probs=none.float() if old is None else old,
            ref_log_probs=none.float() if ref is None or not reads_reference else ref,
            returns=none.float() if estimated.returns is None else estimated.returns,
            values=none.float() if values is None else values,
            value_mask=none if values is None else advantage_inputs.value_mask,
        )
        report = _summarize(experience, advantage_inputs, kl, rollouts.trained_mask)
        report = replace(report, rejected=rejected)
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

    def _make_advantage_inputs(
        self, inputs: ExperienceInputs, trained: Tensor, kl: Tensor
    ) -> AdvantageInputs:
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
        at_end, at_turns = scores, None
        if algorithm.turn_rewards:
            at_turns = self._rewards_of_turns(rollouts, mask)
            at_end = scores - at_turns.sum(1)
        rewards = token_rewards(fit_columns(kl, mask.size(1)), at_end, mask, kl_coef)
        if at_turns is not None:
            rewards = rewards + at_turns
        if algorithm.whiten_rewards:
            rewards = masked_whiten(rewards, mask, self.sum_over_replicas, shift_mean=False)
        values, greedy = None, None
        if inputs.values is not None:
            values = fit_columns(inputs.values.values, mask.size(1)) * mask
        if inputs.greedy is not None and inputs.greedy_scores is not None:
            greedy = self._shape_scores(inputs.greedy, inputs.greedy_scores)
        return AdvantageInputs(
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
            sum_over_replicas=self.sum_over_replicas,
        )

    def _rewards_of_turns(self, rollouts: Rollouts, mask: Tensor) -> Tensor:
        """Return each turn's part of the score, at its last token: [batch, slots] fp32.

        That of the last turn is left out: what the score has beside the others stands at the end.
        """
        turn_rewards = torch.zeros(mask.shape)
        for row, extra_info in enumerate(rollouts.extra_infos):
            record = find_record(extra_info)
            if record is None:
                continue
            weight = self.run.reward.agent_weight(rollouts.data_sources[row])
            turns = zip(record.turns[:-1], record.rewards[:-1], strict=True)
            for (_, end), reward in turns:
                turn_rewards[row, end - 1] = self.algorithm.reward_scale * weight * reward
        return turn_rewards * mask

    def _shape_scores(self, rollouts: Rollouts, scores: Scores) -> Tensor:
        """Return scores [batch], scaled and clipped, minus penalties (missing EOS, length).

        Raises:
            ValueError: Scores are NaN or inf; with `nan_policy: skip` they become NaN instead.
        """
        wrong = []
        for sample_id, score in zip(rollouts.sample_ids, scores.scores.tolist(), strict=True):
            if not isfinite(score):
                wrong.append(f"{score} for sample {sample_id}")
        if wrong and self.run.training.nan_policy == "raise":
            raise ValueError(
                f"scores must be finite numbers, the reward gave {', '.join(wrong[:8])}; correct "
                "the reward, or set training.nan_policy=skip"
            )
        algorithm = self.algorithm
        shaped = shape_scores(scores.scores, algorithm.reward_scale, algorithm.reward_clip)
        shaped = shaped - algorithm.missing_eos_penalty * (~rollouts.has_eos)
        return shaped - overlong_penalty(
            rollouts.response_lengths,
            self.run.actor_rollout.max_new_tokens,
            algorithm.overlong_buffer_len,
            algorithm.overlong_penalty_factor,
        )


def _summarize(
    experience: Experience, inputs: AdvantageInputs, kl: Tensor | None, generated: Tensor
) -> ExperienceReport:
    tokens = experience.trained_mask
    slots = experience.value_mask
    scored = inputs.is_scored
    has_values = bool(slots.numel())
    kl_of_samples: list[float] = []
    if kl is not None:
        rows = generated.any(1)  # not those whose agents have failed
        kl_of_samples = masked_mean(kl[rows], generated[rows], dim=1).tolist()
    return ExperienceReport(
        kl=kl_of_samples,
        score=Summary.of(inputs.scores[scored]),
        rewards=Summary.of(inputs.rewards.sum(1)[scored]),
        advantages=Summary.of(experience.advantages[tokens]),
        returns=Summary.of(experience.returns[slots]) if has_values else None,
        values=Summary.of(experience.values[slots]) if has_values else None,
        fit=value_fit(experience.returns[slots], experience.values[slots]) if has_values else None,
        num_masked=len(scored) - int(scored.sum()),
    )
