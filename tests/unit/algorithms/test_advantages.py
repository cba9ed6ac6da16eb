"""Slots, token rewards and GAE, against hand-worked numbers and a slow double loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.advantages import estimate_gae, rewards_to_go, token_rewards
from mindspeed_rlxf.algorithms.slots import last_slots, readable_slots, value_mask
from tests.rows import length_mask


def slow_gae(
    rewards: Tensor, values: Tensor, lengths: list[int], gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """A_t = sum over l of (gamma lam)^l delta_(t + l), written out; 0 beyond each length."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for row, length in enumerate(lengths):
        for t in range(length):
            total = 0.0
            for s in range(t, length):
                following = float(values[row, s + 1]) if s + 1 < length else 0.0
                delta = float(rewards[row, s]) + gamma * following - float(values[row, s])
                total += (gamma * lam) ** (s - t) * delta
            advantages[row, t] = total
            returns[row, t] = total + float(values[row, t])
    return advantages, returns


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
def test_gae_equals_the_written_out_sum(
    lengths: list[int], gamma: float, lam: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths) + 1)
    rewards = torch.randn(shape, generator=generator, dtype=torch.float64)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = length_mask(torch.tensor(lengths), shape[1])
    expected = slow_gae(rewards, values, lengths, gamma, lam)
    assert_close(estimate_gae(rewards, values, mask, gamma, lam), expected)


def test_gae_of_three_tokens_by_hand() -> None:
    # gamma 0.9, lambda 0.5, gamma * lambda = 0.45
    # delta_2 = 1 - 0.7             =  0.3     A_2 = 0.3
    # delta_1 = 0.9 * 0.7 - 0.6     =  0.03    A_1 = 0.03 + 0.45 * 0.3    = 0.165
    # delta_0 = 0.9 * 0.6 - 0.5     =  0.04    A_0 = 0.04 + 0.45 * 0.165  = 0.11425
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.6, 0.7]])
    advantages, returns = estimate_gae(rewards, values, torch.ones(1, 3).bool(), 0.9, 0.5)
    assert_close(advantages, torch.tensor([[0.11425, 0.165, 0.3]]))
    assert_close(returns, torch.tensor([[0.61425, 0.765, 1.0]]))


def test_gae_ignores_what_stands_after_the_last_slot() -> None:
    rewards, values = torch.randn(2, 5), torch.randn(2, 5)
    mask = length_mask(torch.tensor([3, 5]), 5)
    clean = estimate_gae(rewards, values, mask, 0.99, 0.95)
    rewards[0, 3:], values[0, 3:] = 100.0, -100.0
    dirty = estimate_gae(rewards, values, mask, 0.99, 0.95)
    assert_close(dirty, clean, rtol=0, atol=0)
    assert not clean[0][0, 3:].any() and not clean[1][0, 3:].any()


def test_undiscounted_return_is_the_reward_to_go() -> None:
    # gamma = lambda = 1: the return of slot t is the sum of the rewards from t on, whatever V says
    rewards = torch.tensor([[1.0, 2.0, 4.0, 0.0]])
    mask = length_mask(torch.tensor([3]), 4)
    _, returns = estimate_gae(rewards, torch.randn(1, 4), mask, 1.0, 1.0)
    assert_close(returns, torch.tensor([[7.0, 6.0, 4.0, 0.0]]))


@pytest.mark.parametrize(
    ("length", "has_eos", "position", "limit", "slots"),
    [
        (3, True, "after_eos", 8, 4),  # EOS at slot 2, 3 < 8: one slot more
        (7, True, "after_eos", 8, 8),  # the last slot that may exist
        (8, True, "after_eos", 8, 8),  # EOS in the last slot: none after it
        (8, False, "after_eos", 8, 8),  # cut at max_new_tokens
        (3, False, "after_eos", 8, 3),  # no EOS, whatever room there is
        (3, True, "eos", 8, 3),  # verl's position
        (3, True, "after_eos", 3, 3),  # batch width: the longest row has no slot more
        (2, True, "after_eos", 3, 3),  # batch width: shorter rows have
        (1, True, "after_eos", 1, 1),  # one token allowed, and it is EOS
    ],
)
def test_slot_after_eos_exists_below_the_limit(
    length: int, has_eos: bool, position: str, limit: int, slots: int
) -> None:
    there = length_mask(torch.tensor([length]), 8)
    got = value_mask(there, there, torch.tensor([has_eos]), position, limit)
    assert got.tolist() == length_mask(torch.tensor([slots]), 9).tolist()


def test_score_stands_on_the_last_slot_and_the_penalty_on_every_token() -> None:
    # two tokens and a slot after EOS; three tokens cut short
    kl = torch.tensor([[1.0, -2.0, 0.0, 0.0], [0.5, 0.0, 1.0, 0.0]])
    mask = length_mask(torch.tensor([3, 3]), 4)
    rewards = token_rewards(kl, torch.tensor([10.0, -10.0]), mask, 0.1)
    assert_close(rewards, torch.tensor([[-0.1, 0.2, 10.0, 0.0], [-0.05, 0.0, -10.1, 0.0]]))


def test_gae_carries_value_and_advantage_across_tokens_that_are_not_learnt_from() -> None:
    # Tokens a, (x, y given), b, and the slot after EOS: steps of the policy are slots 0, 3, 4.
    # gamma 0.9, lambda 0.5: A_4 = 1 - 0.4                                = 0.6
    # delta_3 = 0.9 * 0.4 - 0.3 = 0.06      A_3 = 0.06 + 0.45 * 0.6      = 0.33
    # delta_0 = 0.9 * 0.3 - 0.2 = 0.07      A_0 = 0.07 + 0.45 * 0.33     = 0.2185
    mask = torch.tensor([[True, False, False, True, True]])
    rewards = torch.tensor([[0.0, 7.0, 7.0, 0.0, 1.0]])
    values = torch.tensor([[0.2, 9.0, 9.0, 0.3, 0.4]])
    advantages, returns = estimate_gae(rewards, values, mask, 0.9, 0.5)
    assert_close(advantages, torch.tensor([[0.2185, 0.0, 0.0, 0.33, 0.6]]))
    assert_close(returns, torch.tensor([[0.4185, 0.0, 0.0, 0.63, 1.0]]))


def test_slots_of_a_response_with_a_gap() -> None:
    # of five tokens the second is given; then one that ends with a given token
    there = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    trained = torch.tensor([[True, False, True, True, True], [True, True, False, False, False]])
    ends = torch.tensor([True, True])
    mask = value_mask(trained, there, ends, "after_eos", 8)
    assert mask.int().tolist() == [[1, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]
    assert last_slots(mask).tolist() == [5, 1]  # takes the score
    assert readable_slots(trained, there).int().tolist() == [[1, 0, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0]]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    gamma=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
def test_rewards_to_go_equal_the_written_out_sum(
    lengths: list[int], gamma: float, seed: int
) -> None:
    shape = (len(lengths), max(lengths) + 1)
    rewards = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()
    found = rewards_to_go(rewards, length_mask(torch.tensor(lengths), shape[1]), gamma)
    for row, length in enumerate(lengths):
        for t in range(shape[1]):
            rest = [gamma ** (s - t) * float(rewards[row, s]) for s in range(t, length)]
            assert float(found[row, t]) == pytest.approx(sum(rest))
