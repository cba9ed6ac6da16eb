"""Artificial rollouts for tests."""

from typing import Any

import torch
from torch import Tensor

from mindspeed_rlxf.data.batch import Rollouts


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """Turn lengths [batch] into a mask [batch, width] that is True at the first `length` places."""
    return torch.arange(width)[None, :] < lengths[:, None]


def rollouts_of(lengths: list[int], has_eos: list[bool]) -> Rollouts:
    """Return rollouts with prompts of two tokens and responses of these lengths.

    Padded places have log-probs other than 0 too.
    """
    rows, width = len(lengths), max(lengths)
    mask = length_mask(torch.tensor(lengths), width)
    log_probs = -torch.rand(rows, width, generator=torch.Generator().manual_seed(0))
    return made_rollouts(
        prompt_ids=torch.ones(rows, 2, dtype=torch.long),
        prompt_lengths=torch.full((rows,), 2),
        response_ids=torch.ones(rows, width, dtype=torch.long) * mask,
        response_mask=mask,
        has_eos=torch.tensor(has_eos),
        rollout_log_probs=log_probs,
    )


def made_rollouts(
    prompt_ids: Tensor,
    prompt_lengths: Tensor,
    response_ids: Tensor,
    response_mask: Tensor,
    has_eos: Tensor,
    trained_mask: Tensor | None = None,
    **columns: Any,
) -> Rollouts:
    """Return rollouts from the given columns; every other column gets a neutral default.

    trained_mask: None = `response_mask`
    columns:      values for columns that are not to have their default
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
