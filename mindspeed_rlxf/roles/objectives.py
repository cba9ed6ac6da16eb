"""Policy objectives: each algorithm's advantages and loss.

The experience ranks (the critic's, or the actor's without a critic) compute advantages, the actor's
ranks the loss. Each rank builds its own objective.
"""

from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from mindspeed_rlxf.algorithms.estimators import ESTIMATORS, Estimate, Rewarded
from mindspeed_rlxf.algorithms.group_advantages import preference_of_pairs
from mindspeed_rlxf.algorithms.kl import kl_per_token
from mindspeed_rlxf.algorithms.losses import (
    ClipRange,
    LossOutput,
    Mean,
    clipped_policy_loss,
    normalised_loss,
    preference_loss,
    sequence_policy_loss,
    truncated_importance,
)
from mindspeed_rlxf.algorithms.masked import AllReduce, masked_whiten
from mindspeed_rlxf.config.enums import AdvantageWhiten, Role, Stage
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Experience, Rollouts, fit_columns
from mindspeed_rlxf.engine.train_engine import PolicyStep, TokenLogProbs


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
        self.kl_in_reward = config.algorithm.kl_in == "reward"
        self.reads_reference = config.algorithm.kl_in == "loss" and Role.REF in config.roles
        low, high = actor.clip_ratio_low, actor.clip_ratio_high
        self.clip = ClipRange(
            actor.clip_ratio if low is None else low,
            actor.clip_ratio if high is None else high,
            actor.clip_ratio_c,
        )

    def estimate(self, given: Rewarded) -> Estimate:
        """Return advantages and returns by `algorithm.adv_estimator`; a collective.

        With `advantage_whiten: batch`, advantages are whitened over the batch on all replicas.
        """
        found = ESTIMATORS[self.algorithm.adv_estimator](given)
        advantages = found.advantages
        if self.algorithm.advantage_whiten is AdvantageWhiten.BATCH:
            advantages = masked_whiten(advantages, given.trained_mask, self.sum_over_replicas)
        return Estimate(advantages, found.returns)

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
        if (threshold := self.algorithm.rollout_is_threshold) is not None:
            rollout = fit_columns(rollouts.rollout_log_probs, advantages.size(1))
            ratio = truncated_importance(experience.old_log_probs, rollout, threshold)
            advantages = advantages * ratio
        loss = partial(self.loss, experience, advantages, kl_coef)
        return PolicyStep(loss, self.actor.logit_temperature)

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
            return column[rows][mask].to(log_probs.device)

        lengths = mask.sum(1)
        old = log_probs.detach()
        if experience.old_log_probs.size(1):
            old = of_tokens(experience.old_log_probs)
        given = log_probs, old, of_tokens(advantages), self.clip
        if self.actor.policy_loss == "gspo":
            token = sequence_policy_loss(*given, lengths)
        else:
            token = clipped_policy_loss(*given)
        loss, parts = token.loss, {"pg_loss": token.loss}
        if self.actor.entropy_coeff:
            loss = loss - self.actor.entropy_coeff * entropy
        if self.reads_reference:
            ref = of_tokens(experience.ref_log_probs)
            parts["kl_loss"] = kl_per_token(log_probs, ref, self.algorithm.kl_penalty)
            loss = loss + kl_coef * parts["kl_loss"]
        per_token = {"pg_clipfrac": token.clipped, "ppo_kl": old - log_probs, "entropy": entropy}
        return normalised_loss(
            loss,
            lengths,
            self.algorithm.loss_normalizer,
            self.actor.max_new_tokens,
            parts,
            per_token,
        )


class PairObjective:
    """Online DPO: the loss prefers the better response to each prompt."""

    kl_in_reward, reads_reference = False, True

    def __init__(self, config: RunConfig) -> None:
        self.actor = config.actor_rollout

    def estimate(self, given: Rewarded) -> Estimate:
        """Return advantage 1 for tokens in a pair's better response, -1 in the worse, 0 if equal.

        NaN if a score in the pair is NaN. No returns.
        """
        return Estimate(preference_of_pairs(given.scores)[:, None] * given.trained_mask)

    def step(
        self, rollouts: Rollouts, experience: Experience, rows: list[int], kl_coef: float
    ) -> PolicyStep:
        """Return the loss function and temperature for an optimizer step."""
        return PolicyStep(partial(self.loss, experience), self.actor.logit_temperature)

    def loss(self, experience: Experience, rows: list[int], tokens: TokenLogProbs) -> LossOutput:
        """Return the DPO loss summed over a micro-batch's pairs, the pair count, and metrics.

        A pair with equal scores has loss 0 and counts only in the entropy; `dpo_decided` is the
        fraction with unequal scores. A NaN score gives a NaN loss. A pair without trained tokens
        could not be scored and does not count. A pair's two `rows` are adjacent; `tokens` follow
        them.
        """
        mask = experience.trained_mask[rows]
        log_probs, entropy = tokens
        ref = experience.ref_log_probs[rows][mask].to(log_probs.device)
        lengths = mask.sum(1).tolist()
        ratios = torch.stack([part.sum() for part in (log_probs - ref).split(lengths)])
        first, second = ratios.view(-1, 2).unbind(1)
        # The preference of a pair is the advantage of its first response at any trained token.
        at = mask.long().argmax(1, keepdim=True)
        sign = experience.advantages[rows].gather(1, at).view(-1, 2)[:, 0].to(log_probs.device)
        chosen = torch.where(sign < 0, second, first)
        rejected = torch.where(sign < 0, first, second)
        decided = (sign != 0).float()
        beta = self.actor.dpo_beta
        loss = preference_loss(chosen, rejected, beta, self.actor.dpo_loss_type) * decided
        loss = loss + 0.0 * sign
        pairs, num_decided = int(mask.any(1).sum()) // 2, int(decided.sum())
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


def make_objective(config: RunConfig, sum_over_replicas: AllReduce) -> Objective:
    """Return pair preferences for online DPO, else the clipped objective.

    `sum_over_replicas` returns a tensor's sum over the data-parallel ranks.
    """
    if config.training.stage is Stage.RAY_ONLINE_DPO:
        return PairObjective(config)
    return ClippedObjective(config, sum_over_replicas)
