"""Reject tokens whose probability differs too much between generation and training."""

from collections.abc import Mapping, Sequence
from math import inf

import torch
from torch import Tensor

from mindspeed_rlxf.algorithms.kl import bounded_log_ratio
from mindspeed_rlxf.config.enums import Rejection


def keep_near_rollout(
    log_ratio: Tensor, mask: Tensor, bounds: Mapping[Rejection, Sequence[float]]
) -> Tensor:
    """Return the mask without the tokens, or whole responses, outside of any bound.

    A statistic is named `token_`, `seq_sum_`, `seq_mean_` or `seq_max_` (of one token, or over the
    tokens of a response) and an estimate of the log-ratio (http://joschu.net/blog/kl-approx.html):
    k1 = -log_ratio, k2 = log_ratio^2 / 2, k3 = exp(log_ratio) - 1 - log_ratio.

    Args:
        log_ratio: [batch, response] training less rollout log-probs; clamped to +-20.
        mask: [batch, response] bool, True for tokens that count.
        bounds: Statistic -> its largest value; for k1 the least and the largest exp(k1).
    """
    log_ratio = bounded_log_ratio(log_ratio)
    estimates = {
        "k1": -log_ratio,
        "k2": 0.5 * log_ratio.square(),
        "k3": torch.exp(log_ratio) - 1.0 - log_ratio,
    }
    near = mask
    for name, limits in bounds.items():
        level, _, estimate = name.rpartition("_")
        values = _aggregate(estimates[estimate], mask, level)
        if estimate == "k1":
            low, high = torch.tensor(limits, dtype=values.dtype).log()
            near = near & (values >= low) & (values <= high)
        else:
            near = near & (values <= limits[0])
    return near


def _aggregate(values: Tensor, mask: Tensor, level: str) -> Tensor:
    """Return each token's value, or its response's [batch, 1]."""
    if level == "token":
        return values
    if level == "seq_max":
        return values.masked_fill(~mask, -inf).amax(1, keepdim=True)
    total = values.where(mask, 0.0).sum(1, keepdim=True)
    return total if level == "seq_sum" else total / mask.sum(1, keepdim=True)
