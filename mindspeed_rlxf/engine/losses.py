"""Turn the losses of tokens into a sum and a weight, which Megatron's schedule adds up."""

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
    """Return a micro-batch's loss as a sum, the weight that divides it later, and its metrics.

    loss:           [tokens] with gradient, response after response
    lengths:        [responses] number of tokens of each; 0 = the response is masked out
    max_new_tokens: divisor of each response's sum with `sequence_sums`, whatever its length
    parts:          name -> [tokens], metrics averaged as the loss is
    per_token:      name -> [tokens], metrics averaged over tokens
    coefficient:    factor of the loss; metrics are reported without it

    The weight is the tokens with `minibatch_tokens`, 1 with `micro_batch_mean` (whose loss, as in
    TRL, is a mean already), else the responses with tokens. It is 0 without any token. The constant
    divisor of `sequence_sums` is that of Dr. GRPO (arXiv:2503.20783, section 3.2).
    """
    tokens, rows = loss.numel(), int((lengths > 0).sum())
    scale, weight, token_scale, token_weight = 1.0, tokens, 1.0, tokens
    if normalizer is LossNormalizer.MICRO_BATCH_MEAN and tokens:
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
