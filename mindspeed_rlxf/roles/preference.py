"""Online DPO: the loss of pairs of responses to the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rlxf.algorithms.losses import preference_loss
from mindspeed_rlxf.config.schema import ActorConfig
from mindspeed_rlxf.data.batch import Experience
from mindspeed_rlxf.engine.engine import LossOutput, Mean
from mindspeed_rlxf.engine.micro_batch import MicroBatch
from mindspeed_rlxf.models.transformer import TransformerModel
from mindspeed_rlxf.roles.log_probs import read_log_probs


def preference_loss_step(
    actor: ActorConfig,
    temperature: float,
    experience: Experience,
    model: TransformerModel,
    batch: MicroBatch,
    hidden: Tensor,
) -> LossOutput:
    """Loss of one micro-batch of whole pairs, the mean over pairs; NaN with a score that is NaN.

    A pair with equal scores prefers neither: it counts, with a loss of 0. Metrics are over the
    pairs that are decided, whose share is `dpo_decided`.
    """
    log_probs, entropy = read_log_probs(model, batch, hidden, temperature)
    mask = experience.response_mask[batch.rows]
    ref = experience.ref_log_probs[batch.rows][mask].to(log_probs.device)
    ratios = torch.stack(
        [part.sum() for part in (log_probs - ref).split(batch.response_lengths.tolist())]
    )
    preferred = experience.advantages[batch.rows][:, 0].to(log_probs.device)  # 1, -1, 0 or NaN
    first, second = ratios.view(-1, 2).unbind(1)
    sign = preferred.view(-1, 2)[:, 0]
    chosen = torch.where(sign < 0, second, first)
    rejected = torch.where(sign < 0, first, second)
    decided = (sign != 0).float()
    loss = preference_loss(chosen, rejected, actor.dpo_beta, actor.dpo_loss_type) * decided
    loss = loss + 0.0 * sign
    pairs, num_decided = len(loss), int(decided.sum())
    metrics = {
        "dpo_loss": Mean.of(loss, num_decided),
        "dpo_accuracy": Mean.of((chosen > rejected) * decided, num_decided),
        "dpo_margin": Mean.of((chosen - rejected) * decided * actor.dpo_beta, num_decided),
        "dpo_decided": Mean.of(decided, pairs),
        "entropy": Mean.of(entropy, len(entropy)),
    }
    return LossOutput(loss.sum(), pairs, metrics)
