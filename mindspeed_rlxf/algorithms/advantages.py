"""Token rewards, generalised advantage estimation, and the slots that they live in.

A response of n tokens has the slots 0 .. n - 1, one per token, and with `score_position:
after_eos` one more slot n after an EOS, which takes the score; its value is the critic's at the EOS
token. The extra slot exists only below the slot limit, so that it never reaches beyond what could
be generated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rlxf.config.enums import ScorePosition


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """[batch] lengths -> [batch, width] bool, True below the length."""
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def slot_counts(
    response_lengths: Tensor, has_eos: Tensor, position: ScorePosition, slot_limit: int
) -> Tensor:
    """[batch] number of slots of each response.

    response_lengths: [batch] int64; has_eos: [batch] bool, the last token is an EOS
    slot_limit: slots that a response can have at most (`max_new_tokens`, or TRL's batch width)
    """
    extra = has_eos & (response_lengths < slot_limit)
    if position is ScorePosition.EOS:
        extra = torch.zeros_like(extra)
    return response_lengths + extra.long()


def token_rewards(kl: Tensor, scores: Tensor, slots: Tensor, kl_coef: float) -> Tensor:
    """-kl_coef * KL on every token, plus the score on the last slot.

    kl: [batch, slots] fp32, 0 beyond the response; scores: [batch]; slots: [batch] counts
    Returns [batch, slots].
    """
    rewards = -kl_coef * kl
    return rewards.scatter_add(1, (slots - 1)[:, None], scores[:, None])


def estimate_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE advantages and returns (arXiv:1506.02438, section 3).

    rewards: [batch, slots] fp32, KL penalty already added
    values:  [batch, slots] fp32
    mask:    [batch, slots] bool, True = slot of the response, without gaps from slot 0
    Returns two [batch, slots] tensors, 0 where masked; advantages are not whitened, returns are
    advantages + values.
    """
    rewards, values = rewards * mask, values * mask
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    next_values = torch.zeros_like(following)
    for slot in reversed(range(rewards.size(1))):
        delta = rewards[:, slot] + gamma * next_values - values[:, slot]
        following = delta + gamma * lam * following
        advantages[:, slot] = following
        next_values = values[:, slot]
    advantages = advantages * mask
    return advantages, (advantages + values) * mask


def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each slot on: the return of REINFORCE.

    rewards: [batch, slots] fp32; mask: [batch, slots] bool, without gaps from slot 0
    Returns [batch, slots], 0 where masked.
    """
    _, returns = estimate_gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    return returns
