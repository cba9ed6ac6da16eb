"""Token rewards, generalised advantage estimation and rewards to go.

Axes: slots = positions of rewards and values, one more than tokens of a response (`slots`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mindspeed_rlxf.algorithms.discounting import BLOCK, discounted_sums
from mindspeed_rlxf.algorithms.slots import last_slots


def token_rewards(kl: Tensor, scores: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Return [batch, slots] rewards: -kl_coef * kl, plus the score on each row's last True slot.

    kl:     [batch, slots] fp32, 0 where not learnt from
    scores: [batch]
    mask:   [batch, slots] bool, `slots.value_mask`; a row without True has its score on slot 0
    """
    rewards = -kl_coef * kl
    return rewards.scatter_add(1, last_slots(mask)[:, None], scores[:, None])


def estimate_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) by GAE (arXiv:1506.02438, section 3), each [batch, slots].

    Both are 0 where `mask` is False. Advantages are not whitened; returns are advantages + values.
    rewards: [batch, slots] fp32, KL penalty already added
    values:  [batch, slots] fp32
    mask:    [batch, slots] bool, True = slot that is learnt from. Other slots are skipped, as if
             they were cut out of the row: the slot after a True slot is the next True slot
    lam:     one for all responses, or [batch] fp32
    """
    counts = mask.sum(1)
    packed = torch.arange(mask.size(1), device=mask.device) < counts[:, None]
    if bool((packed == mask).all()):
        advantages = _sum_td_errors(rewards * mask, values * mask, counts, gamma, lam)
    else:  # move the True slots to the front, so that what is between them changes no bit
        slots, steps = mask.flatten().nonzero()[:, 0], packed.flatten().nonzero()[:, 0]
        reward, value = (_move(column, slots, steps) for column in (rewards, values))
        advantages = _move(_sum_td_errors(reward, value, counts, gamma, lam), steps, slots)
    return advantages, (advantages + values) * mask


def _move(values: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    """Return a tensor shaped as `values`: 0, but values[sources[i]] at targets[i] for each i.

    sources, targets: indices of the flattened tensor
    """
    flat = torch.zeros_like(values).flatten()
    moved = values.flatten().index_select(0, sources)
    return flat.index_copy_(0, targets, moved).view(values.shape)


def _sum_td_errors(
    rewards: Tensor, values: Tensor, counts: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """Return [batch, steps]: for each step the discounted sum of its and all later TD errors.

    The discount per step is gamma * lam.
    rewards, values: [batch, steps], 0 after the first counts[row] steps of a row
    counts:          [batch] int64
    lam:             one for all rows, or [batch]
    Rows of more than BLOCK steps are summed in fp64 if the tensors are on the CPU; on other
    devices, which may have no fp64, all rows are summed in the dtype of `values`. The result has
    that dtype.
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

    The longer a response, the closer to 1. Departure: 0 where alpha * l < 1, for which the formula
    gives a negative number.
    lengths: [batch] int64, at least 1 -> [batch] fp32
    """
    return (1.0 - 1.0 / (alpha * lengths.float())).clamp(min=0.0)


def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return [batch, slots]: the sum of this slot's reward and the discounted rewards after it.

    0 where `mask` is False. This is the return of REINFORCE. A False slot is skipped as if cut out:
    its reward does not count and it does not discount.
    rewards: [batch, slots] fp32
    mask:    [batch, slots] bool, True = slot that is learnt from
    gamma:   discount per True slot
    """
    _, returns = estimate_gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    return returns
