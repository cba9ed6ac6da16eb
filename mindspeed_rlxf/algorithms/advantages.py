"""Token rewards, generalised advantage estimation and rewards to go, over the slots of responses.

Slots: see `slots`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mindspeed_rlxf.algorithms.discounting import BLOCK, discounted_sums
from mindspeed_rlxf.algorithms.slots import last_slots


def token_rewards(kl: Tensor, scores: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Return -kl_coef * KL on every token, plus the score on the last slot.

    kl: [batch, slots] fp32, 0 where not learnt from; scores: [batch]
    mask: [batch, slots] bool, `slots.value_mask`
    Returns [batch, slots].
    """
    rewards = -kl_coef * kl
    return rewards.scatter_add(1, last_slots(mask)[:, None], scores[:, None])


def estimate_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Estimate GAE advantages and returns (arXiv:1506.02438, section 3).

    rewards: [batch, slots] fp32, KL penalty already added
    values:  [batch, slots] fp32
    mask:    [batch, slots] bool, True = slot that is learnt from. Value and running advantage are
             carried unchanged across other slots, which are no steps of the policy: the steps of
             a response are moved together, so that a row of BLOCK steps or fewer has the same bits
             whatever values are between and beside them.
    lam:     of all responses, or [batch] fp32
    Returns two [batch, slots] tensors, 0 where masked; advantages are not whitened, returns are
    advantages + values.
    """
    counts = mask.sum(1)
    taken = torch.arange(mask.size(1), device=mask.device) < counts[:, None]
    if bool((taken == mask).all()):
        advantages = _sum_errors(rewards * mask, values * mask, counts, gamma, lam)
    else:
        places, steps = mask.flatten().nonzero()[:, 0], taken.flatten().nonzero()[:, 0]
        reward, value = (_moved(column, places, steps) for column in (rewards, values))
        advantages = _moved(_sum_errors(reward, value, counts, gamma, lam), steps, places)
    return advantages, (advantages + values) * mask


def _moved(column: Tensor, places: Tensor, to: Tensor) -> Tensor:
    """Return a column of the same shape, its values at flat `places` moved `to` other places."""
    flat = torch.zeros_like(column).flatten()
    return flat.index_copy_(0, to, column.flatten().index_select(0, places)).view(column.shape)


def _sum_errors(
    rewards: Tensor, values: Tensor, counts: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """Sum the discounted TD errors from each step on.

    rewards, values: [batch, steps], those of `counts` steps and then 0; counts: [batch]
    Rows of more than one block are summed in fp64 if the tensors are on the CPU, and rounded once;
    on another device, which may have no fp64, and in shorter rows, in the precision of `values`.
    """
    sums = torch.zeros_like(values)
    long = counts > BLOCK
    for rows, width, wide in ((~long, BLOCK, False), (long, values.size(1), True)):
        if not bool(rows.any()):
            continue
        dtype = torch.float64 if wide and values.device.type == "cpu" else values.dtype
        reward, value = (column[rows, :width].to(dtype) for column in (rewards, values))
        errors = reward + gamma * pad(value[:, 1:], (0, 1)) - value
        factors = gamma * (lam[rows].to(dtype) if isinstance(lam, Tensor) else lam)
        factors = torch.as_tensor(factors, dtype=dtype, device=values.device).expand(len(errors))
        sums[rows, :width] = discounted_sums(errors, factors).to(values.dtype)
    return sums


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Return lambda = 1 - 1 / (alpha * l) of responses of l tokens (VAPO, arXiv:2504.05118, 4.2).

    With gamma = 1 the weights of all TD errors, 1 / (1 - lambda), then sum up to alpha * l: a
    reward at the end reaches the same share of a short and of a long response. Departure: 0 where
    alpha * l < 1, for which the formula gives a negative number.
    lengths: [batch] int64, at least 1 -> [batch] fp32
    """
    return (1.0 - 1.0 / (alpha * lengths.float())).clamp(min=0.0)


def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Sum the discounted rewards from each slot on: the return of REINFORCE.

    rewards: [batch, slots] fp32; mask: [batch, slots] bool, as in `estimate_gae`
    Returns [batch, slots], 0 where masked.
    """
    _, returns = estimate_gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    return returns
