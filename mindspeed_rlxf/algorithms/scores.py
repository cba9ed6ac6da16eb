"""Shape the scores of a reward function or model for training."""

from __future__ import annotations

import torch
from torch import Tensor


def shape_scores(scores: Tensor, scale: float, clip: float | None) -> Tensor:
    """Return scale * score, held within -clip .. clip. [batch] -> [batch].

    NaN where a score is no finite number: clipping would hide it.
    """
    scaled = scores.where(scores.isfinite(), torch.nan) * scale
    return scaled if clip is None else scaled.clamp(-clip, clip)


def overlong_penalty(
    response_lengths: Tensor, max_new_tokens: int, buffer_len: int, factor: float
) -> Tensor:
    """Return the soft penalty of long responses (DAPO, arXiv:2503.14476, section 3.4), >= 0.

    It rises linearly from 0 at max_new_tokens - buffer_len to `factor` at max_new_tokens.
    response_lengths: [batch] int64 -> [batch] fp32; buffer_len 0 = no penalty.
    """
    if not buffer_len:
        return response_lengths.float() * 0.0
    beyond = (response_lengths - (max_new_tokens - buffer_len)).float()
    return (beyond / buffer_len).clamp(0.0, 1.0) * factor
