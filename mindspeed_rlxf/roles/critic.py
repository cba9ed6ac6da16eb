"""The value model: values of a rollout, the experience made from them, its own update."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from mindspeed_rlxf.algorithms.advantages import (
    estimate_gae,
    length_mask,
    slot_counts,
    token_rewards,
)
from mindspeed_rlxf.algorithms.kl import kl_per_token
from mindspeed_rlxf.algorithms.losses import clipped_value_loss
from mindspeed_rlxf.algorithms.masked import masked_mean, masked_whiten
from mindspeed_rlxf.config.enums import AdvantageWhiten, LossNormalizer
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import (
    Experience,
    LogProbs,
    RoleOutput,
    Rollouts,
    Scores,
    Values,
    fit_columns,
)
from mindspeed_rlxf.engine.engine import LossOutput, MegatronEngine
from mindspeed_rlxf.engine.losses import normalised_loss
from mindspeed_rlxf.engine.micro_batch import MicroBatch, scatter_rows
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.models.transformer import TransformerModel
from mindspeed_rlxf.roles.reports import ExperienceReport, Summary, UpdateReport


class CriticRole:
    def __init__(self, config: RunConfig) -> None:
        critic = config.critic
        self.config, self.algorithm = critic, config.algorithm
        self.engine = MegatronEngine(
            critic, Head.SCORE, config.training.seed, critic.optimizer, config.training.train_iters
        )

    def values(self, rollouts: Rollouts) -> RoleOutput:
        """Slot t is the value of the state before token t; the last one is at the last token."""
        batches = self.engine.micro_batches(rollouts, range(rollouts.num_rows))

        def read(model: TransformerModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
            return _read_values(model, batch, hidden, batch.response_lengths + 1)

        flat = self.engine.forward(batches, read)
        if not self.engine.groups.is_leader:
            return RoleOutput()
        counts = [batch.response_lengths + 1 for batch in batches]
        return RoleOutput(Values(scatter_rows(flat, counts, rollouts.response_ids.size(1) + 1)))

    def make_experience(
        self,
        rollouts: Rollouts,
        old: LogProbs | None,
        ref: LogProbs,
        values: Values,
        scores: Scores,
        kl_coef: float,
        slot_limit: int,
    ) -> RoleOutput:
        """KL-shaped rewards, GAE and whitening (design, section 6); a collective over replicas.

        old: recomputed log-probs, or None where the rollout's own are used
        slot_limit: slots that a response can have at most
        """
        _check_finite(scores.scores, rollouts.sample_ids)
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
        kl = kl_per_token(old_log_probs, ref_log_probs, algorithm.kl_penalty) * response_mask
        score = scores.scores - algorithm.missing_eos_penalty * (~rollouts.has_eos)
        rewards = token_rewards(fit_columns(kl, width + 1), score, slots, kl_coef)
        kept_values = fit_columns(values.values, width + 1) * value_mask
        advantages, returns = estimate_gae(
            rewards, kept_values, value_mask, algorithm.gamma, algorithm.lam
        )
        advantages = advantages[:, :width]
        if algorithm.advantage_whiten is AdvantageWhiten.BATCH:
            advantages = masked_whiten(advantages, response_mask, self.engine.sum_over_replicas)
        experience = Experience(
            advantages=advantages * response_mask,
            response_mask=response_mask,
            old_log_probs=old_log_probs,
            returns=returns,
            values=kept_values,
            value_mask=value_mask,
        )
        return RoleOutput(experience, _experience_report(experience, kl, score, rewards))

    def update_critic(
        self, rollouts: Rollouts, experience: Experience, steps: list[list[int]]
    ) -> RoleOutput:
        """One optimizer step for each entry of `steps`: this rank's rows of a mini-batch."""

        loss_step = partial(self.value_loss_step, experience)
        metrics = []
        for rows in steps:
            batches = self.engine.micro_batches(rollouts, rows)
            metrics.append(self.engine.train_step(batches, loss_step))
        return RoleOutput(report=UpdateReport(metrics, self.engine.end_iteration()))

    def value_loss_step(
        self, experience: Experience, model: TransformerModel, batch: MicroBatch, hidden: Tensor
    ) -> LossOutput:
        """Loss of one micro-batch on the last stage, inside Megatron's schedule."""
        mask = experience.value_mask[batch.rows]
        values = _read_values(model, batch, hidden, mask.sum(1))
        old = experience.values[batch.rows][mask].to(values.device)
        returns = experience.returns[batch.rows][mask].to(values.device)
        token = clipped_value_loss(values, old, returns, self.config.cliprange_value)
        per_token = {"vf_loss": token.loss, "vf_clipfrac": token.clipped, "vpred_mean": values}
        mean = self.algorithm.loss_normalizer is LossNormalizer.MICRO_BATCH_MEAN
        return normalised_loss(token.loss, per_token, mean, self.config.vf_coef)

    def export(self, hf_folder: Path, megatron_folder: Path | None) -> RoleOutput:
        """Write the weights; a collective over the role's ranks."""
        self.engine.export(hf_folder, megatron_folder)
        return RoleOutput()


def _check_finite(scores: Tensor, sample_ids: list[int]) -> None:
    """One score that is no number would spoil every advantage of the batch."""
    wrong = [i for i, good in zip(sample_ids, scores.isfinite().tolist(), strict=True) if not good]
    if wrong:
        raise ValueError(f"scores must be finite numbers, those of samples {wrong[:8]} are not")


def _read_values(
    model: TransformerModel, batch: MicroBatch, hidden: Tensor, count: Tensor
) -> Tensor:
    """Flat values of the first `count` slots of each row, fp32."""
    full = model.full_hidden(hidden, partial_gradient=False)
    return model.score(full.index_select(0, batch.prediction_places(count)))


def _experience_report(
    experience: Experience, kl: Tensor, score: Tensor, rewards: Tensor
) -> ExperienceReport:
    tokens, slots = experience.response_mask, experience.value_mask
    return ExperienceReport(
        kl=masked_mean(kl, tokens, dim=1).tolist(),
        score=Summary.of(score),
        rewards=Summary.of(rewards.sum(1)),
        advantages=Summary.of(experience.advantages[tokens]),
        returns=Summary.of(experience.returns[slots]),
        values=Summary.of(experience.values[slots]),
    )
