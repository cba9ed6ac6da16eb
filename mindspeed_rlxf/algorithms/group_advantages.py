"""Response advantages relative to the other responses for the same prompt (a group).

Shapes: `batch` are samples; the `group_size` (2 or more) samples for a prompt are adjacent. Rewards
are response totals: score, penalties, and the KL penalty if it belongs to the reward. A response
that is not `scored` belongs to no group: its advantage is 0, like that for a response alone in its
group.
"""

from math import isfinite

import torch
from torch import Tensor

EPSILON = 1e-8


def grpo_advantages(rewards: Tensor, scored: Tensor, group_size: int) -> Tensor:
    """Return (R - mean) / (std + 1e-8) within each group (GRPO, arXiv:2402.03300, 4.1.2).

    `rewards`, `scored` and the result are [batch]. The standard deviation has divisor n - 1.
    """
    centred, counts = _centre(rewards, scored, group_size)
    variance = centred.square().sum(1, keepdim=True) / (counts - 1).clamp(min=1)
    return (centred / (variance.sqrt() + EPSILON)).flatten().to(rewards.dtype)


def dr_grpo_advantages(rewards: Tensor, scored: Tensor, group_size: int) -> Tensor:
    """Return R - group mean (Dr. GRPO, arXiv:2503.20783, 3.2), as `grpo_advantages`."""
    return _centre(rewards, scored, group_size)[0].flatten().to(rewards.dtype)


def rloo_advantages(rewards: Tensor, scored: Tensor, group_size: int) -> Tensor:
    """Return R - mean over the group's other rewards (RLOO, arXiv:2402.14740).

    Equals (R - group mean) * n / (n - 1). Arguments as for `grpo_advantages`.
    """
    centred, counts = _centre(rewards, scored, group_size)
    return (centred * counts / (counts - 1).clamp(min=1)).flatten().to(rewards.dtype)


def groups_that_differ(scores: list[float], scored: list[bool], group_size: int) -> list[int]:
    """Return the indices for groups whose `scored` scores are unequal, NaN or infinite."""
    found = []
    for start in range(0, len(scores), group_size):
        members = range(start, start + group_size)
        group = [scores[i] for i in members if scored[i]]
        if len(set(group)) > 1 or not all(map(isfinite, group)):
            found.append(start // group_size)
    return found


def _centre(rewards: Tensor, scored: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return fp64 rewards minus their group mean [groups, group_size], and counts [groups, 1].

    0 where not scored. In fp32 the mean over equal rewards may differ from them, and 1 / std would
    amplify that. Tensors must be on the host, because an NPU converts fp64 to fp32.
    """
    assert group_size >= 2 and len(rewards) % group_size == 0, "whole groups of two or more"
    mask = scored.view(-1, group_size)
    groups = rewards.double().view(-1, group_size).where(mask, 0.0)
    counts = mask.sum(1, keepdim=True)
    centred = groups - groups.sum(1, keepdim=True) / counts.clamp(min=1)
    return centred.where(mask, 0.0), counts


def preference_of_pairs(rewards: Tensor) -> Tensor:
    """Return [batch]: +1 for a pair's better response, -1 for the worse, 0 if equal.

    A pair's two responses are adjacent. NaN for both if one reward is NaN, or if both are inf or
    -inf.
    """
    first, second = rewards.view(-1, 2).unbind(1)
    difference = first - second
    sign = torch.where(difference.isnan(), difference, torch.sign(difference))
    return torch.stack((sign, -sign), 1).flatten()
