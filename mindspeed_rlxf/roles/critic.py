"""The value model: values of a rollout, the experience made from them, its own update."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from mindspeed_rlxf.algorithms.losses import clipped_value_loss
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import (
    Experience,
    LogProbs,
    RoleOutput,
    Rollouts,
    Scores,
    Values,
)
from mindspeed_rlxf.engine.engine import LossOutput, MegatronEngine
from mindspeed_rlxf.engine.finite import SkippedSteps
from mindspeed_rlxf.engine.losses import normalised_loss
from mindspeed_rlxf.engine.micro_batch import MicroBatch, scatter_rows
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.models.transformer import TransformerModel
from mindspeed_rlxf.roles.experience import ExperienceMaker
from mindspeed_rlxf.roles.reports import UpdateReport
from mindspeed_rlxf.roles.saved import SavedRole


class CriticRole(SavedRole):
    def __init__(self, config: RunConfig) -> None:
        critic = config.value_model
        self.config, self.algorithm = critic, config.algorithm
        training = config.training
        self.engine = MegatronEngine(
            critic,
            Head.SCORE,
            training.seed,
            critic.optimizer,
            training.train_iters,
            SkippedSteps(training.nan_policy, training.max_skipped, "critic"),
            training.deterministic,
            training.tokenizer_name_or_path,
        )
        self.experience = ExperienceMaker(config, self.engine.sum_over_replicas)

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
        """KL-shaped rewards, GAE and whitening; a collective over replicas."""
        return self.experience.with_values(rollouts, old, ref, values, scores, kl_coef, slot_limit)

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
        return normalised_loss(
            token.loss,
            mask.sum(1),
            self.algorithm.loss_normalizer,
            {"vf_loss": token.loss},
            {"vf_clipfrac": token.clipped, "vpred_mean": values},
            self.config.vf_coef,
        )


def _read_values(
    model: TransformerModel, batch: MicroBatch, hidden: Tensor, count: Tensor
) -> Tensor:
    """Flat values of the first `count` slots of each row, fp32."""
    full = model.full_hidden(hidden, partial_gradient=False)
    return model.score(full.index_select(0, batch.prediction_places(count)))
