"""Turn losses of tokens into the sums and weights that Megatron's schedule adds up."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rlxf.config.enums import LossNormalizer
from mindspeed_rlxf.engine.protocol import LossOutput, Mean


def normalised_loss(
    loss: Tensor,
    lengths: Tensor,
    normalizer: LossNormalizer,
    max_new_tokens: int,
    parts: dict[str, Tensor],
    per_token: dict[str, Tensor],
    coefficient: float = 1.0,
) -> LossOutput:
    """Return a micro-batch's loss as a sum, the weight it is divided by later, and its metrics.

    loss:           [tokens] with gradient, response after response
    lengths:        [responses] tokens of each
    max_new_tokens: divisor of a response's sum under `sequence_sums`, whatever its length
    parts:          name -> [tokens], reported as the loss is averaged
    per_token:      name -> [tokens], reported as means over tokens
    coefficient:    weight of the loss; metrics are reported without it

    `micro_batch_mean` is TRL's way: loss and metrics are means of micro-batch means. The constant
    divisor is that of Dr. GRPO (arXiv:2503.20783, section 3.2), the largest length of a response.
    """
    tokens, rows = loss.numel(), len(lengths)
    scale, weight, token_scale, token_weight = 1.0, tokens, 1.0, tokens
    if normalizer is LossNormalizer.MICRO_BATCH_MEAN:
        scale, weight, token_scale, token_weight = 1.0 / tokens, 1, 1.0 / tokens, 1
    elif normalizer is not LossNormalizer.MINIBATCH_TOKENS:
        weight = rows
    if normalizer is LossNormalizer.SEQUENCE_SUMS:
        scale = 1.0 / max_new_tokens
    if normalizer is LossNormalizer.SEQUENCE_MEANS:
        own = torch.repeat_interleave(lengths, lengths).to(loss.device)
        loss, parts = loss / own, {name: values / own for name, values in parts.items()}
    metrics = {name: Mean.of(values, weight, scale) for name, values in parts.items()}
    metrics |= {name: Mean.of(v, token_weight, token_scale) for name, v in per_token.items()}
    return LossOutput(loss.sum() * (coefficient * scale), weight, metrics)
