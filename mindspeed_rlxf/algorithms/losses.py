"""Losses of PPO, GSPO, DPO and the value model, per token or per pair; callers sum and normalise.

Arguments per token are flat [tokens] fp32 tensors of the trained tokens only, response after
response; there is no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mindspeed_rlxf.algorithms.kl import bounded_log_ratio
from mindspeed_rlxf.config.enums import LossNormalizer


@dataclass(frozen=True)
class Mean:
    """A metric of one micro-batch: a detached sum, and the weight to divide it by."""

    total: Tensor  # scalar fp64; fp32 on an NPU, which has no fp64
    weight: int

    @classmethod
    def of(cls, values: Tensor, weight: int, scale: float = 1.0) -> Mean:
        """Return a Mean whose total is the sum of `values` (any shape) times `scale`, detached."""
        return cls(values.detach().double().sum() * scale, weight)


@dataclass(frozen=True)
class LossOutput:
    """Loss of one micro-batch, as a sum: the engine divides by the global weight.

    loss:    scalar with gradient, the sum over tokens or responses
    weight:  number of tokens or responses in the micro-batch, or 1 for a mean of means
    metrics: by name; each is reported as its total over its weight, summed over all replicas
    """

    loss: Tensor
    weight: int
    metrics: dict[str, Mean]


class TokenLoss(NamedTuple):
    """loss: [tokens] with gradient; clipped: [tokens] bool, True where clipping changed it."""

    loss: Tensor
    clipped: Tensor


class ClipRange(NamedTuple):
    """Clip range of the ratio: 1 - low to 1 + high.

    dual: upper bound -A * dual of the loss where the advantage A < 0 (dual clip,
          arXiv:1912.09729); None = no bound
    high > low is DAPO's clip-higher (arXiv:2503.14476, section 3.1).
    """

    low: float
    high: float
    dual: float | None = None


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: ClipRange
) -> TokenLoss:
    """Return the loss max(-A r, -A clip(r, 1 - low, 1 + high)), and where clipping changed it.

    Both per token; r = exp(log_probs - old_log_probs), A = advantages (PPO, arXiv:1707.06347,
    section 3). With `clip.dual` the loss is at most -A * dual where A < 0. The log-ratio is clamped
    to +-20 against overflow of exp, so a token beyond that has no gradient.
    """
    ratio = torch.exp(bounded_log_ratio(log_probs - old_log_probs))
    return _clip_loss(ratio, advantages, clip)


def sequence_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: ClipRange, lengths: Tensor
) -> TokenLoss:
    """Return per token the clipped loss with one ratio per response, and where clipping changed it.

    GSPO-token, arXiv:2507.18071, 4.3. The ratio of all tokens of a response is the exponential of
    the mean, over its tokens, of log_probs - old_log_probs, clamped to +-20. Its gradient flows to
    each token's own log_prob, with weight 1.
    log_probs, old_log_probs, advantages: [tokens] of all responses, one response after the other
    lengths: [responses] int64, tokens of each response; they add up to the length of `log_probs`
    """
    lengths = lengths.to(log_probs.device)
    row = torch.repeat_interleave(torch.arange(len(lengths), device=log_probs.device), lengths)
    difference = (log_probs - old_log_probs).detach()
    sums = difference.new_zeros(len(lengths)).index_add(0, row, difference)
    means = (sums / lengths)[row]
    ratio = torch.exp(bounded_log_ratio(means + (log_probs - log_probs.detach())))
    return _clip_loss(ratio, advantages, clip)


def _clip_loss(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> TokenLoss:
    """Return max(-A r, -A clip(r, 1 - low, 1 + high)) of ratios r, and where clipping changed -A r.

    If `clip.dual` is given, at most -A * dual where A < 0, which counts as clipped too.
    """
    free = -advantages * ratio
    held = -advantages * torch.clamp(ratio, 1.0 - clip.low, 1.0 + clip.high)
    loss, clipped = torch.maximum(free, held), held > free
    if clip.dual is not None:
        bound = -advantages * clip.dual
        over = (advantages < 0) & (loss > bound)
        loss, clipped = torch.where(over, bound, loss), clipped | over
    return TokenLoss(loss, clipped)


def truncated_importance(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """Return min(exp(old_log_probs - rollout_log_probs), cap), of the arguments' shape, detached.

    The importance weight of tokens that the rollout sampled, for the training model
    (https://fengyao.notion.site/off-policy-rl). The log-ratio is clamped to +-20.
    """
    ratio = torch.exp(bounded_log_ratio(old_log_probs - rollout_log_probs))
    return ratio.clamp(max=cap).detach()


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float | None
) -> TokenLoss:
    """Return the loss 0.5 * max((v - R)^2, (v_clip - R)^2), and where clipping raised it.

    Both per element; v = values, R = returns, v_clip = v clamped to old value +- `cliprange_value`.
    cliprange_value: None = 0.5 * (v - R)^2, nothing is clipped
    """
    moved = values - old_values
    if cliprange_value is None:
        return TokenLoss(0.5 * (values - returns).square(), torch.zeros_like(moved).bool())
    held_values = old_values + torch.clamp(moved, -cliprange_value, cliprange_value)
    free = (values - returns).square()
    held = (held_values - returns).square()
    # Inside the range both are equal but for rounding, which must not count as clipped.
    clipped = (moved.abs() > cliprange_value) & (held > free)
    return TokenLoss(0.5 * torch.maximum(free, held), clipped)


def preference_loss(chosen: Tensor, rejected: Tensor, beta: float, kind: str) -> Tensor:
    """Return [pairs]: the loss of direct preference optimisation of each pair, for `kind`.

    chosen, rejected: [pairs] log(pi / pi_ref), summed over the tokens of the whole response
    sigmoid: -log sigmoid(beta h), h = chosen - rejected (arXiv:2305.18290, equation 7)
    ipo:     (h - 1 / (2 beta))^2 (arXiv:2310.12036, equation 17)
    hinge:   max(0, 1 - beta h) (arXiv:2305.10425)
    """
    margin = chosen - rejected
    if kind == "sigmoid":
        return -logsigmoid(beta * margin)
    if kind == "ipo":
        return (margin - 1 / (2 * beta)).square()
    assert kind == "hinge", f"unknown preference loss {kind}"
    return torch.relu(1 - beta * margin)


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
