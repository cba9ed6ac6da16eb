"""Advantages within a group, against loops that use nothing but the statistics module."""

import statistics
from collections.abc import Callable
from math import nan

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from mindspeed_rlxf.algorithms.estimators import (
    dr_grpo_advantages,
    groups_that_differ,
    grpo_advantages,
    preference_of_pairs,
    rloo_advantages,
)


def slow_grpo(group: list[float]) -> list[float]:
    mean, deviation = statistics.fmean(group), statistics.stdev(group)
    return [(reward - mean) / (deviation + 1e-8) for reward in group]


def slow_dr_grpo(group: list[float]) -> list[float]:
    return [reward - statistics.fmean(group) for reward in group]


def slow_rloo(group: list[float]) -> list[float]:
    return [reward - statistics.fmean(group[:i] + group[i + 1 :]) for i, reward in enumerate(group)]


REWARDS = st.floats(-4, 4, width=32).map(lambda reward: round(reward, 3))


@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        (grpo_advantages, slow_grpo),
        (dr_grpo_advantages, slow_dr_grpo),
        (rloo_advantages, slow_rloo),
    ],
)
@settings(max_examples=60, deadline=None)
@given(size=st.integers(2, 5), data=st.data())
def test_every_response_is_compared_with_its_own_group(
    fast: Callable[[Tensor, Tensor, int], Tensor],
    slow: Callable[[list[float]], list[float]],
    size: int,
    data: st.DataObject,
) -> None:
    """A reward of None is that of a response that could not be scored."""
    group = st.lists(REWARDS | st.none(), min_size=size, max_size=size)
    groups = data.draw(st.lists(group, min_size=1, max_size=4))
    expected = []
    for members in groups:
        scored = [reward for reward in members if reward is not None]
        found = iter(slow(scored) if len(scored) > 1 else [0.0] * len(scored))
        expected += [0.0 if reward is None else next(found) for reward in members]
    flat = [reward for members in groups for reward in members]
    rewards = torch.tensor([nan if r is None else r for r in flat], dtype=torch.float64)
    found = fast(rewards, ~rewards.isnan(), size)
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_grpo_of_four_by_hand() -> None:
    # mean 0.5, deviations -0.5 -0.5 0.5 0.5, variance 1 / 3 with divisor 3
    advantages = grpo_advantages(torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.ones(4).bool(), 4)
    assert advantages.tolist() == pytest.approx([-(0.75**0.5)] * 2 + [0.75**0.5] * 2)
    assert advantages.dtype == torch.float32


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e6])
@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_equal_rewards_have_no_advantage(reward: float, size: int) -> None:
    """In fp32 the mean of seven 0.1 is not 0.1, and 1e-8 / 1e-8 would be an advantage of 1."""
    rewards = torch.full((size,), reward)
    assert not grpo_advantages(rewards, torch.ones(size).bool(), size).any()


def test_groups_with_one_score_only_are_found_and_wrong_scores_are_not_alike() -> None:
    scores = [1.0, 1.0, 0.0, 1.0, 0.5, 0.5, 2.0, 1.0]
    assert groups_that_differ(scores, [True] * 8, 2) == [1, 3]
    assert groups_that_differ(scores, [True] * 8, 4) == [0, 1]
    assert groups_that_differ([1.0, nan, 2.0, 2.0, nan, 1.0], [True] * 6, 2) == [0, 2]
    # Without the first and the last two, the groups have 1 0 1 and 0.5 0.5.
    assert groups_that_differ(scores, [False, *[True] * 5, False, False], 4) == [0]
    assert groups_that_differ(scores, [False] * 7 + [True], 4) == []


def test_the_better_of_a_pair_is_preferred_and_equals_are_not() -> None:
    signs = preference_of_pairs(torch.tensor([1.0, 0.5, -2.0, 3.0, 0.7, 0.7]))
    assert signs.tolist() == [1, -1, -1, 1, 0, 0]
