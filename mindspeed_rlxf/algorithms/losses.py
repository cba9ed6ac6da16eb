"""Clipped losses of PPO (arXiv:1707.06347), per token; callers sum and normalise.

All arguments are flat [tokens] fp32 tensors of tokens that count: nothing is masked here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    """loss: [tokens] with gradient; clipped: [tokens] bool, True where the clip is what counts."""

    loss: Tensor
    clipped: Tensor


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_ratio: float
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - c, 1 + c)) with r = exp(log_probs - old_log_probs)."""
    ratio = torch.exp(log_probs - old_log_probs)
    free = -advantages * ratio
    held = -advantages * torch.clamp(ratio, 1.0 - clip_ratio, 1.0 + clip_ratio)
    return TokenLoss(torch.maximum(free, held), held > free)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float
) -> TokenLoss:
    """0.5 * max((v - R)^2, (v_clip - R)^2), v_clip within `cliprange_value` of the old value."""
    moved = values - old_values
    held_values = old_values + torch.clamp(moved, -cliprange_value, cliprange_value)
    free = (values - returns).square()
    held = (held_values - returns).square()
    # Inside the range both are equal but for rounding, which must not count as clipped.
    clipped = (moved.abs() > cliprange_value) & (held > free)
    return TokenLoss(0.5 * torch.maximum(free, held), clipped)
