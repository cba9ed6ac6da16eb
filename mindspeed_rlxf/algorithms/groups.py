"""Advantages of whole responses, from the rewards of responses to the same prompt.

Axes: batch = samples; those of one prompt stand next to each other, `group_size` of them. Rewards
are totals of a response: score, penalties, and the KL penalty where it is part of the reward.
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

EPSILON = 1e-8


def grpo_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Normalise rewards in their group: (R - mean) / (std + 1e-8) (arXiv:2402.03300, 4.1.2).

    The standard deviation has divisor n - 1. rewards: [batch] -> [batch].
    """
    groups = _groups(rewards, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return _flat(centred / (groups.std(1, keepdim=True) + EPSILON), rewards)


def dr_grpo_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Centre rewards in their group, R - mean (arXiv:2503.20783, 3.2). [batch] -> [batch]"""
    groups = _groups(rewards, group_size)
    return _flat(groups - groups.mean(1, keepdim=True), rewards)


def rloo_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Compute R - mean of the others in the group (RLOO, arXiv:2402.14740). [batch] -> [batch]"""
    groups = _groups(rewards, group_size)
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return _flat(groups - others, rewards)


def groups_that_differ(scores: list[float], group_size: int) -> list[int]:
    """Return the indices of groups whose scores differ, or are not finite."""
    groups = [scores[i : i + group_size] for i in range(0, len(scores), group_size)]
    return [
        number
        for number, group in enumerate(groups)
        if min(group) != max(group) or not all(map(isfinite, group))
    ]


def _groups(rewards: Tensor, group_size: int) -> Tensor:
    """View rewards as [groups, group_size] fp64.

    In fp32 the mean of equal rewards may differ from them, which 1 / std would amplify.

    rewards: on the host, as an NPU makes fp32 of fp64
    """
    assert group_size >= 2 and len(rewards) % group_size == 0, "whole groups of two or more"
    return rewards.double().view(-1, group_size)


def _flat(groups: Tensor, like: Tensor) -> Tensor:
    return groups.flatten().to(like.dtype)


def preference_of_pairs(rewards: Tensor) -> Tensor:
    """Return +1 for the better of two neighbours, -1 for the other, 0 for both if equal.

    rewards: [batch], pairs next to each other -> [batch]; NaN for both where one is.
    """
    first, second = rewards.view(-1, 2).unbind(1)
    difference = first - second
    sign = torch.where(difference.isnan(), difference, torch.sign(difference))
    return torch.stack((sign, -sign), 1).flatten()
