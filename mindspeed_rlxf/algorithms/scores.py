"""Shape the scores of a reward function or model for training."""

from __future__ import annotations

import torch
from torch import Tensor


def shape_scores(scores: Tensor, scale: float, clip: float | None) -> Tensor:
    """Return scale * score, clamped to +-clip; clip None = not clamped. [batch] -> [batch].

    NaN where a score is NaN or inf, because clamping would hide inf.
    """
    scaled = scores.where(scores.isfinite(), torch.nan) * scale
    return scaled if clip is None else scaled.clamp(-clip, clip)


def overlong_penalty(
    response_lengths: Tensor, max_new_tokens: int, buffer_len: int, factor: float
) -> Tensor:
    """Return what to subtract from the scores of long responses (DAPO, arXiv:2503.14476, 3.4).

    It rises linearly from 0 at max_new_tokens - buffer_len to `factor` at max_new_tokens, and is
    constant outside these lengths; all 0 with buffer_len 0.
    response_lengths: [batch] int64 -> [batch] fp32, >= 0
    """
    if not buffer_len:
        return response_lengths.float() * 0.0
    beyond = (response_lengths - (max_new_tokens - buffer_len)).float()
    return (beyond / buffer_len).clamp(0.0, 1.0) * factor
