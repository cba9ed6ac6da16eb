"""Advantages of whole responses, from the rewards of all responses to the same prompt (a group).

Axes: batch = samples; the `group_size` (2 or more) samples of one prompt are next to each other.
Rewards are totals of a response: score, penalties, and the KL penalty if it is in the reward.
A response that is not `scored` belongs to no group: its advantage is 0, and so is that of a
response that is alone in its group.
"""

from math import isfinite

import torch
from torch import Tensor

EPSILON = 1e-8


def grpo_advantages(rewards: Tensor, scored: Tensor, group_size: int) -> Tensor:
    """Return (R - mean) / (std + 1e-8) of each group (GRPO, arXiv:2402.03300, 4.1.2).

    The standard deviation has divisor n - 1. AssertionError for a group_size of 1.
    rewards: [batch], the `group_size` rewards of a group are adjacent -> [batch]
    scored:  [batch] bool
    """
    centred, counts = _centre(rewards, scored, group_size)
    variance = centred.square().sum(1, keepdim=True) / (counts - 1).clamp(min=1)
    return (centred / (variance.sqrt() + EPSILON)).flatten().to(rewards.dtype)


def dr_grpo_advantages(rewards: Tensor, scored: Tensor, group_size: int) -> Tensor:
    """Return each reward minus the mean of its group (Dr. GRPO, arXiv:2503.20783, 3.2), [batch].

    The arguments are those of `grpo_advantages`.
    """
    return _centre(rewards, scored, group_size)[0].flatten().to(rewards.dtype)


def rloo_advantages(rewards: Tensor, scored: Tensor, group_size: int) -> Tensor:
    """Return R - mean of the group's other rewards, for each reward R (RLOO, arXiv:2402.14740).

    It is (R - mean of the group) * n / (n - 1). The arguments are those of `grpo_advantages`.
    """
    centred, counts = _centre(rewards, scored, group_size)
    return (centred * counts / (counts - 1).clamp(min=1)).flatten().to(rewards.dtype)


def groups_that_differ(scores: list[float], scored: list[bool], group_size: int) -> list[int]:
    """Return the indices of groups with unequal scores, or with a score that is NaN or inf.

    scores: of all samples, group after group; those that are not `scored` do not count
    """
    found = []
    for start in range(0, len(scores), group_size):
        members = range(start, start + group_size)
        group = [scores[i] for i in members if scored[i]]
        if len(set(group)) > 1 or not all(map(isfinite, group)):
            found.append(start // group_size)
    return found


def _centre(rewards: Tensor, scored: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return the rewards minus the mean of their group, and the number of scored ones, in fp64.

    [groups, group_size], 0 where not scored, and [groups, 1]. In fp32 the mean of equal rewards may
    differ from them, which 1 / std would amplify.
    rewards, scored: [batch] on the host, because an NPU converts fp64 to fp32; whole groups of two
                     or more, else AssertionError
    """
    assert group_size >= 2 and len(rewards) % group_size == 0, "whole groups of two or more"
    mask = scored.view(-1, group_size)
    groups = rewards.double().view(-1, group_size).where(mask, 0.0)
    counts = mask.sum(1, keepdim=True)
    centred = groups - groups.sum(1, keepdim=True) / counts.clamp(min=1)
    return centred.where(mask, 0.0), counts


def preference_of_pairs(rewards: Tensor) -> Tensor:
    """Return +1 for the better response of a pair, -1 for the worse, 0 for both if they are equal.

    rewards: [batch], two responses of a pair next to each other -> [batch]
    NaN for both where the reward of one is NaN, and where both are inf or both -inf.
    """
    first, second = rewards.view(-1, 2).unbind(1)
    difference = first - second
    sign = torch.where(difference.isnan(), difference, torch.sign(difference))
    return torch.stack((sign, -sign), 1).flatten()
