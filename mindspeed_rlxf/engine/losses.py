"""From per-token losses to what Megatron's schedule sums up."""

from __future__ import annotations

from torch import Tensor

from mindspeed_rlxf.engine.engine import LossOutput


def normalised_loss(
    loss: Tensor, metrics: dict[str, Tensor], micro_batch_mean: bool, coefficient: float = 1.0
) -> LossOutput:
    """Sum of the token losses with the token count, or the micro-batch's mean with weight 1.

    loss:        [tokens] with gradient
    metrics:     name -> [tokens], averaged in the same way
    coefficient: weight of the loss; metrics are reported without it
    """
    tokens = loss.numel()
    scale = 1.0 / tokens if micro_batch_mean else 1.0
    return LossOutput(
        loss=loss.sum() * (coefficient * scale),
        weight=1 if micro_batch_mean else tokens,
        metrics={name: values.detach().double().sum() * scale for name, values in metrics.items()},
    )
