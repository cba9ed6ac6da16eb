"""Token rewards, generalised advantage estimation and rewards to go, over the slots of responses.

Slots: see `slots`.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
             carried unchanged across other slots, which are no steps of the policy.
    lam:     of all responses, or [batch] fp32
    Returns two [batch, slots] tensors, 0 where masked; advantages are not whitened, returns are
    advantages + values.
    """
    rewards, values = rewards * mask, values * mask
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    next_values = torch.zeros_like(following)
    for slot in reversed(range(rewards.size(1))):
        delta = rewards[:, slot] + gamma * next_values - values[:, slot]
        here = mask[:, slot]
        following = torch.where(here, delta + gamma * lam * following, following)
        next_values = torch.where(here, values[:, slot], next_values)
        advantages[:, slot] = following
    advantages = advantages * mask
    return advantages, (advantages + values) * mask


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
