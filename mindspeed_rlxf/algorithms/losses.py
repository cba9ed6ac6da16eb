"""PPO, GSPO, DPO and value losses, per token or per pair; callers sum and normalise.

Per-token arguments are flat [tokens] fp32 tensors that hold only trained tokens, response after
response; there is no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mindspeed_rlxf.algorithms.kl import bounded_log_ratio
from mindspeed_rlxf.config.enums import LossNormalizer
from mindspeed_rlxf.config.registry import add_to


@dataclass(frozen=True)
class Mean:
    """A micro-batch metric: a detached sum, and the weight that divides it."""

    total: Tensor  # scalar fp64; fp32 on an NPU, which has no fp64
    weight: int

    @classmethod
    def of(cls, values: Tensor, weight: int, scale: float = 1.0) -> Mean:
        """Return a Mean whose total is sum(values) * scale, detached; any shape."""
        return cls(values.detach().double().sum() * scale, weight)


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's loss as a sum; the engine divides by the global weight.

    Attributes:
        loss: Scalar with gradient, summed over tokens or responses.
        weight: Number of tokens or responses in the micro-batch, or 1 for a mean of means.
        metrics: Reported as total / weight, each summed over all replicas.
    """

    loss: Tensor
    weight: int
    metrics: dict[str, Mean]


class TokenLoss(NamedTuple):
    """Loss [tokens] with gradient, and a [tokens] bool mask: True if clipping changed it."""

    loss: Tensor
    clipped: Tensor


class ClipRange(NamedTuple):
    """Ratio clip range 1 - low to 1 + high; high > low is clip-higher (arXiv:2503.14476, 3.1).

    With an advantage A < 0, `dual` bounds the loss by -A * dual (dual clip, arXiv:1912.09729).
    `covariance_fraction` and `kl_coef` are for the losses that look for covariant tokens.
    """

    low: float
    high: float
    dual: float | None = None
    covariance_fraction: float = 2e-4
    kl_coef: float = 0.1


def copy_beside(values: Tensor, on_host: Tensor) -> Tensor:
    """Copy a host tensor to the device of `values`, without waiting for its work until now.

    As `device.copies.upload`, for rooms that know no devices.
    """
    if on_host.device == values.device:
        return on_host
    return on_host.pin_memory().to(values.device, non_blocking=True)


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: ClipRange
) -> TokenLoss:
    """Return the PPO loss max(-A r, -A clip(r, 1 - low, 1 + high)) per token.

    r = exp(log_probs - old_log_probs) and A = advantages (arXiv:1707.06347, section 3). `clip.dual`
    bounds it by -A * dual if A < 0. The log-ratio is clamped to +-20 so that exp cannot overflow;
    tokens beyond have no gradient.
    """
    ratio = torch.exp(bounded_log_ratio(log_probs - old_log_probs))
    return _clip_loss(ratio, advantages, clip)


def sequence_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: ClipRange, lengths: Tensor
) -> TokenLoss:
    """Return the clipped loss per token with one ratio per response.

    GSPO-token, arXiv:2507.18071, 4.3: the response ratio is exp(mean over tokens (log_probs -
    old_log_probs)), its exponent clamped to +-20. Gradients flow to each token's own log_prob with
    weight 1. `lengths` [responses] int64 add up to len(log_probs).
    """
    row = copy_beside(log_probs, torch.repeat_interleave(torch.arange(len(lengths)), lengths))
    lengths = copy_beside(log_probs, lengths)
    difference = (log_probs - old_log_probs).detach()
    sums = difference.new_zeros(len(lengths)).index_add(0, row, difference)
    means = (sums / lengths)[row]
    ratio = torch.exp(bounded_log_ratio(means + (log_probs - log_probs.detach())))
    return _clip_loss(ratio, advantages, clip)


def geometric_mean_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: ClipRange, lengths: Tensor
) -> TokenLoss:
    """Return -A * exp(mean over the response's tokens of the clipped log-ratio), for each token.

    GMPO, arXiv:2507.20673: log-ratios are clipped to -low and high where that lowers A * ratio. A
    response has one loss, so its mean over tokens counts (`sequence_means`).
    """
    row = copy_beside(log_probs, torch.repeat_interleave(torch.arange(len(lengths)), lengths))
    lengths = copy_beside(log_probs, lengths)
    log_ratio = bounded_log_ratio(log_probs - old_log_probs)
    clamped = torch.clamp(log_ratio, -clip.low, clip.high)
    sign = torch.sign(advantages)
    chosen = sign * torch.minimum(sign * log_ratio, sign * clamped)
    zeros = log_ratio.new_zeros(len(lengths))
    mean = zeros.index_add(0, row, chosen) / lengths
    advantage = zeros.index_add(0, row, advantages) / lengths
    loss = (-advantage * torch.exp(mean))[row]
    return TokenLoss(loss, sign * clamped < sign * log_ratio)


def clipped_weight_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: ClipRange, _: Tensor
) -> TokenLoss:
    """Return -A * clip(r, 1 - low, 1 + high) * log_prob, with no gradient through the ratio r.

    CISPO, arXiv:2506.13585, section 3.1: every token keeps a gradient.
    """
    ratio = torch.exp(bounded_log_ratio(log_probs - old_log_probs)).detach()
    weight = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return TokenLoss(-advantages * weight * log_probs, weight != ratio)


def plain_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: ClipRange, _: Tensor
) -> TokenLoss:
    """Return -A * log_prob: the policy gradient without a ratio (GPG, arXiv:2504.02546)."""
    return TokenLoss(-advantages * log_probs, torch.zeros_like(log_probs).bool())


def masked_ratio_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: ClipRange, _: Tensor
) -> TokenLoss:
    """Return -A * r for tokens whose ratio r is within [1 - low, 1 + high], and 0 for the others.

    Double-sided importance sampling (SAO, arXiv:2607.07508). The sign of A does not matter, unlike
    in PPO, so a token that moved far has no gradient in either direction. `clip.dual` is not read.
    """
    ratio = torch.exp(bounded_log_ratio(log_probs - old_log_probs))
    outside = (ratio < 1.0 - clip.low) | (ratio > 1.0 + clip.high)
    return TokenLoss((-advantages * ratio).masked_fill(outside, 0.0), outside)


COVARIANCE_RANGE = 1.0, 5.0
"""Covariances among which Clip-Cov chooses tokens; arXiv:2505.22617, section 4.2."""


def covariance_clipped_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: ClipRange, _: Tensor
) -> TokenLoss:
    """Return the PPO loss, and 0 for a few tokens of high covariance (Clip-Cov, arXiv:2505.22617).

    The covariance of a token is (A - mean A) * (log_prob - mean log_prob) over the micro-batch. Of
    the tokens in COVARIANCE_RANGE that PPO does not clip, `covariance_fraction` of all tokens, at
    least one, are chosen at random, but the same each time.
    """
    token = clipped_policy_loss(log_probs, old_log_probs, advantages, clip._replace(dual=None))
    covariance = _covariance(log_probs, advantages)
    low, high = COVARIANCE_RANGE
    inside = (covariance > low) & (covariance < high) & ~token.clipped
    candidates = inside.nonzero()[:, 0]
    count = max(1, int(clip.covariance_fraction * len(log_probs)))
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(0))
    chosen = torch.zeros_like(inside)
    chosen[candidates[order[:count].to(candidates.device)]] = True
    return TokenLoss(token.loss.masked_fill(chosen, 0.0), chosen)


def covariance_penalty_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: ClipRange, _: Tensor
) -> TokenLoss:
    """Return -A * r, with a KL penalty on a few tokens (KL-Cov, arXiv:2505.22617).

    The tokens with the highest covariances of the micro-batch, `covariance_fraction` of all, at
    least one, also have `kl_coef` * |log r|.
    """
    log_ratio = bounded_log_ratio(log_probs - old_log_probs)
    loss = -advantages * torch.exp(log_ratio)
    chosen = torch.zeros_like(loss).bool()
    num_tokens = len(log_probs)
    if num_tokens > 0:
        num_chosen = max(1, int(clip.covariance_fraction * num_tokens))
        chosen[torch.topk(_covariance(log_probs, advantages), num_chosen).indices] = True
    return TokenLoss(loss + clip.kl_coef * log_ratio.abs() * chosen, chosen)


def _covariance(log_probs: Tensor, advantages: Tensor) -> Tensor:
    values = log_probs.detach()
    return (advantages - advantages.mean()) * (values - values.mean())


PolicyLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor, ClipRange, Tensor], TokenLoss]
"""Called with the arguments of `sequence_policy_loss`."""
POLICY_LOSSES: dict[str, PolicyLoss] = {
    "gspo": sequence_policy_loss,
    "geo_mean": geometric_mean_loss,
    "cispo": clipped_weight_loss,
    "gpg": plain_policy_loss,
    "dis": masked_ratio_loss,
    "clip_cov": covariance_clipped_loss,
    "kl_cov": covariance_penalty_loss,
}
"""Value of `policy_loss` besides ppo -> the loss."""


def register_policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Return a decorator that adds a loss to POLICY_LOSSES; ValueError if the name is taken."""
    return add_to(POLICY_LOSSES, name, "policy loss", "policy_loss")


def _clip_loss(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> TokenLoss:
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * torch.clamp(ratio, 1.0 - clip.low, 1.0 + clip.high)
    loss = torch.maximum(unclipped_loss, clipped_loss)
    is_clipped = clipped_loss > unclipped_loss
    if clip.dual is not None:
        bound = -advantages * clip.dual
        is_over = (advantages < 0) & (loss > bound)
        loss = torch.where(is_over, bound, loss)
        is_clipped = is_clipped | is_over
    return TokenLoss(loss, is_clipped)


def truncated_importance(
    old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float, low: float | None = None
) -> Tensor:
    """Return the importance weights min(r, cap), r = exp(old_log_probs - rollout_log_probs).

    They weigh tokens that the rollout sampled for the training model
    (https://fengyao.notion.site/off-policy-rl). Tokens with r < `low` have weight 0. Detached, in
    the arguments' shape; the log-ratio is clamped to +-20.
    """
    ratio = torch.exp(bounded_log_ratio(old_log_probs - rollout_log_probs)).detach()
    weight = ratio.clamp(max=cap)
    return weight if low is None else weight.masked_fill(ratio < low, 0.0)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float | None
) -> TokenLoss:
    """Return the value loss 0.5 * max((v - R)^2, (v_clip - R)^2) per slot.

    v = values, R = returns, and v_clip is v clamped to the old value +- `cliprange_value`; None =
    no clipping.
    """
    moved = values - old_values
    if cliprange_value is None:
        return TokenLoss(0.5 * (values - returns).square(), torch.zeros_like(moved).bool())
    clipped_values = old_values + torch.clamp(moved, -cliprange_value, cliprange_value)
    unclipped_loss = (values - returns).square()
    clipped_loss = (clipped_values - returns).square()
    # Inside the range both are equal but for rounding, which must not count as clipped.
    is_clipped = (moved.abs() > cliprange_value) & (clipped_loss > unclipped_loss)
    return TokenLoss(0.5 * torch.maximum(unclipped_loss, clipped_loss), is_clipped)


def preference_loss(chosen: Tensor, rejected: Tensor, beta: float, kind: str) -> Tensor:
    """Return the direct preference optimisation loss [pairs].

    h = chosen - rejected; each is log(pi / pi_ref) [pairs], summed over the response tokens.
    - sigmoid: -log sigmoid(beta h) (arXiv:2305.18290, equation 7)
    - ipo: (h - 1 / (2 beta))^2 (arXiv:2310.12036, equation 17)
    - hinge: max(0, 1 - beta h) (arXiv:2305.10425)
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
    like_loss: dict[str, Tensor],
    per_token: dict[str, Tensor],
    coefficient: float = 1.0,
) -> LossOutput:
    """Return a micro-batch's loss as a sum, the weight that divides it later, and its metrics.

    The weight is the token count for `minibatch_tokens`, 1 for `micro_batch_mean` (already a mean,
    as in TRL), else the number of responses with tokens; 0 without any token. The constant divisor
    for `sequence_sums` is Dr. GRPO's (arXiv:2503.20783, section 3.2).

    Args:
        loss: [tokens] with gradient, response after response.
        lengths: [responses], tokens per response; 0 = masked out.
        normalizer: How token losses are averaged.
        max_new_tokens: Divisor for each response sum with `sequence_sums`, whatever its length.
        like_loss: Name -> [tokens], metrics averaged like the loss.
        per_token: Name -> [tokens], metrics averaged over tokens.
        coefficient: Loss factor; metrics are reported without it.
    """
    num_tokens = loss.numel()
    # Of the loss and the metrics like it, then of the metrics per token.
    scale = token_scale = 1.0
    weight = token_weight = num_tokens
    if normalizer is LossNormalizer.MICRO_BATCH_MEAN and num_tokens:
        scale = token_scale = 1.0 / num_tokens
        weight = token_weight = 1
    elif normalizer is not LossNormalizer.MINIBATCH_TOKENS:
        weight = int((lengths > 0).sum())
    if normalizer is LossNormalizer.SEQUENCE_SUMS:
        scale = 1.0 / max_new_tokens
    if normalizer is LossNormalizer.SEQUENCE_MEANS:
        length_of_token = copy_beside(loss, torch.repeat_interleave(lengths, lengths))
        loss = loss / length_of_token
        like_loss = {name: values / length_of_token for name, values in like_loss.items()}
    metrics = {name: Mean.of(values, weight, scale) for name, values in like_loss.items()}
    for name, values in per_token.items():
        metrics[name] = Mean.of(values, token_weight, token_scale)
    return LossOutput(loss.sum() * (coefficient * scale), weight, metrics)
