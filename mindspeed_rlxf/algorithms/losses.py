"""Losses of PPO and its relatives, per token or per pair; callers sum and normalise.

Token arguments are flat [tokens] fp32 tensors of tokens that count, response after response:
nothing is masked here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mindspeed_rlxf.algorithms.ratios import bounded_log_ratio
from mindspeed_rlxf.config.enums import DpoLoss


class TokenLoss(NamedTuple):
    """loss: [tokens] with gradient; clipped: [tokens] bool, True where the clip is what counts."""

    loss: Tensor
    clipped: Tensor


class ClipRange(NamedTuple):
    """The ratio is held within 1 - low .. 1 + high; `dual` bounds the loss of A < 0 by -A dual.

    high > low is DAPO's clip-higher (arXiv:2503.14476, section 3.1), `dual` is the dual clip of
    arXiv:1912.09729.
    """

    low: float
    high: float
    dual: float | None = None


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: ClipRange
) -> TokenLoss:
    """Compute max(-A r, -A clip(r, 1 - low, 1 + high)), r = exp(log_probs - old_log_probs).

    PPO, arXiv:1707.06347, section 3. The log-ratio is held within +-20: a token beyond that has no
    gradient, where an overflow of exp would make it NaN.
    """
    ratio = torch.exp(bounded_log_ratio(log_probs - old_log_probs))
    return _clipped(ratio, advantages, clip)


def sequence_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: ClipRange, lengths: Tensor
) -> TokenLoss:
    """Compute the clipped loss with one ratio per response (GSPO-token, arXiv:2507.18071, 4.3).

    The ratio is exp(mean of log_probs - old_log_probs over the response); its gradient reaches each
    token with weight 1. The mean is held within +-20, as the log-ratio of a token.
    lengths: [responses] int64, tokens of each response, summing up to [tokens]
    """
    lengths = lengths.to(log_probs.device)
    row = torch.repeat_interleave(torch.arange(len(lengths), device=log_probs.device), lengths)
    difference = (log_probs - old_log_probs).detach()
    sums = torch.zeros_like(difference[: len(lengths)]).index_add(0, row, difference)
    means = (sums / lengths)[row]
    ratio = torch.exp(bounded_log_ratio(means + (log_probs - log_probs.detach())))
    return _clipped(ratio, advantages, clip)


def _clipped(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> TokenLoss:
    """Compute the clipped loss of a ratio, with a bound for negative advantages if `clip.dual`."""
    free = -advantages * ratio
    held = -advantages * torch.clamp(ratio, 1.0 - clip.low, 1.0 + clip.high)
    loss, clipped = torch.maximum(free, held), held > free
    if clip.dual is not None:
        bound = -advantages * clip.dual
        over = (advantages < 0) & (loss > bound)
        loss, clipped = torch.where(over, bound, loss), clipped | over
    return TokenLoss(loss, clipped)


def truncated_importance(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """min(exp(old_log_probs - rollout_log_probs), cap): the importance weight of a token that was
    sampled by the rollout, under the training model (https://fengyao.notion.site/off-policy-rl).

    any shape; no gradient. The log-ratio is held within +-20.
    """
    ratio = torch.exp(bounded_log_ratio(old_log_probs - rollout_log_probs))
    return ratio.clamp(max=cap).detach()


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float | None
) -> TokenLoss:
    """Compute 0.5 * max((v - R)^2, (v_clip - R)^2), v_clip close to the old value.

    cliprange_value: most that v_clip may differ from the old value; None = 0.5 * (v - R)^2

    cliprange_value: None = 0.5 * (v - R)^2
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


def preference_loss(chosen: Tensor, rejected: Tensor, beta: float, kind: DpoLoss) -> Tensor:
    """Compute the loss of direct preference optimisation for each pair.

    chosen, rejected: [pairs] log(pi / pi_ref) of the whole response
    sigmoid: -log sigmoid(beta h), h = chosen - rejected (arXiv:2305.18290, equation 7)
    ipo:     (h - 1 / (2 beta))^2 (arXiv:2310.12036, equation 17)
    hinge:   max(0, 1 - beta h) (arXiv:2305.10425)
    """
    margin = chosen - rejected
    if kind is DpoLoss.SIGMOID:
        return -logsigmoid(beta * margin)
    if kind is DpoLoss.IPO:
        return (margin - 1 / (2 * beta)).square()
    assert kind is DpoLoss.HINGE, f"unknown preference loss {kind}"
    return torch.relu(1 - beta * margin)
