"""Rows made up for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_rlxf.data.batch import Rollouts


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """[batch] lengths -> [batch, width] bool, True below the length."""
    return torch.arange(width)[None, :] < lengths[:, None]


def made_rollouts(
    prompt_ids: Tensor,
    prompt_lengths: Tensor,
    response_ids: Tensor,
    response_mask: Tensor,
    has_eos: Tensor,
    trained_mask: Tensor | None = None,
    **columns: Any,
) -> Rollouts:
    """Rollouts whose other columns are what generation without a data set would give.

    trained_mask: None = all tokens of the response
    columns: those that are to be others
    """
    rows = len(response_ids)
    usual = {
        "sample_ids": list(range(rows)),
        "rollout_log_probs": torch.zeros(response_ids.shape),
        "ground_truths": [""] * rows,
        "data_sources": [""] * rows,
        "weights_version": torch.zeros(response_ids.shape, dtype=torch.int32),
    }
    given = {
        "prompt_ids": prompt_ids,
        "prompt_lengths": prompt_lengths,
        "response_ids": response_ids,
        "response_mask": response_mask,
        "trained_mask": response_mask if trained_mask is None else trained_mask,
        "has_eos": has_eos,
    }
    return Rollouts(**{**usual, **given, **columns})
