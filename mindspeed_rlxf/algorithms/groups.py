"""Advantages of whole responses, from the rewards of all responses to the same prompt (a group).

Axes: batch = samples; the `group_size` (2 or more) samples of one prompt are next to each other.
Rewards are totals of a response: score, penalties, and the KL penalty if it is in the reward.
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

EPSILON = 1e-8


def grpo_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return (R - mean) / (std + 1e-8) of each group (GRPO, arXiv:2402.03300, 4.1.2).

    The standard deviation has divisor n - 1. AssertionError for a group_size of 1.
    rewards: [batch], the `group_size` rewards of a group are adjacent -> [batch]
    """
    groups = _groups(rewards, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return _flatten_groups(centred / (groups.std(1, keepdim=True) + EPSILON), rewards)


def dr_grpo_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return each reward minus the mean of its group (Dr. GRPO, arXiv:2503.20783, 3.2), [batch].

    Rewards of a group are adjacent, `group_size` each.
    """
    groups = _groups(rewards, group_size)
    return _flatten_groups(groups - groups.mean(1, keepdim=True), rewards)


def rloo_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return R - mean of the group's other rewards, for each reward R (RLOO, arXiv:2402.14740).

    rewards: [batch], the `group_size` rewards of a group are adjacent -> [batch]
    """
    groups = _groups(rewards, group_size)
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return _flatten_groups(groups - others, rewards)


def groups_that_differ(scores: list[float], group_size: int) -> list[int]:
    """Return the indices of groups with unequal scores, or with a score that is NaN or inf.

    scores: of all samples, group after group
    """
    groups = [scores[i : i + group_size] for i in range(0, len(scores), group_size)]
    return [
        number
        for number, group in enumerate(groups)
        if min(group) != max(group) or not all(map(isfinite, group))
    ]


def _groups(rewards: Tensor, group_size: int) -> Tensor:
    """Return rewards as [groups, group_size] fp64. AssertionError unless the groups are whole.

    A group has two or more rewards. In fp32 the mean of equal rewards may differ from them, which
    1 / std would amplify.
    rewards: [batch] on the host, because an NPU converts fp64 to fp32
    """
    assert group_size >= 2 and len(rewards) % group_size == 0, "whole groups of two or more"
    return rewards.double().view(-1, group_size)


def _flatten_groups(groups: Tensor, like: Tensor) -> Tensor:
    return groups.flatten().to(like.dtype)


def preference_of_pairs(rewards: Tensor) -> Tensor:
    """Return +1 for the better response of a pair, -1 for the worse, 0 for both if they are equal.

    rewards: [batch], two responses of a pair next to each other -> [batch]
    NaN for both where the reward of one is NaN, and where both are inf or both -inf.
    """
    first, second = rewards.view(-1, 2).unbind(1)
    difference = first - second
    sign = torch.where(difference.isnan(), difference, torch.sign(difference))
    return torch.stack((sign, -sign), 1).flatten()
