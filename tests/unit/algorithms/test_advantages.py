"""Slots, token rewards and GAE, against hand-worked numbers and a slow double loop."""

from dataclasses import replace
from math import nan

import pytest
import torch
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.advantages import (
    estimate_gae,
    length_adaptive_lambda,
    token_rewards,
)
from mindspeed_rlxf.algorithms.estimators import ESTIMATORS, AdvantageInputs, gae
from mindspeed_rlxf.algorithms.slots import last_slots, readable_slots, value_mask
from tests.rows import length_mask


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


def test_lambda_grows_with_the_length_of_the_response() -> None:
    # VAPO's alpha of 0.05: 1 - 1 / 5, 1 - 1 / 50, and 0 where 0.05 l < 1
    found = length_adaptive_lambda(torch.tensor([100, 1000, 20, 3]), 0.05)
    assert_close(found, torch.tensor([0.8, 0.98, 0.0, 0.0]))


def two_responses(**lambdas: float) -> AdvantageInputs:
    """Of four tokens and of two; a reward of 1 at the end, values of 0.1 at every token."""
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    keys = {"lam": 0.2, **lambdas}
    return AdvantageInputs(
        rewards.sum(1), rewards, mask, mask, mask * 0.1, None, 1, gamma=1.0, **keys
    )  # fmt: skip


def test_lambdas_of_policy_and_critic_by_hand() -> None:
    # deltas: 0 0 0 0.9 | 0 0.9, so that A_t = lambda^(end - t) * 0.9
    # lam_alpha 0.5: lambda = 1 - 1 / 2 = 0.5 for four tokens, 1 - 1 / 1 = 0 for two
    advantages = torch.tensor([[0.1125, 0.225, 0.45, 0.9], [0.0, 0.9, 0.0, 0.0]])
    whole = torch.tensor([[1.0] * 4, [1.0, 1.0, 0.0, 0.0]])  # lambda 1: what comes is 1
    found = gae(two_responses(lam_alpha=0.5, critic_lam=1.0))
    assert_close(found, (advantages, whole))
    # without critic_lam the returns have lam = 0.2: 0.1 + 0.2^(end - t) * 0.9
    returns = torch.tensor([[0.1072, 0.136, 0.28, 1.0], [0.28, 1.0, 0.0, 0.0]])
    assert_close(gae(two_responses(lam_alpha=0.5)), (advantages, returns))
    assert_close(gae(two_responses(critic_lam=1.0)), (gae(two_responses()).advantages, whole))
    assert_close(gae(two_responses()).returns, returns)


def test_lambda_counts_tokens_that_are_learnt_from() -> None:
    """Neither tokens between them that were given, nor the slot after EOS."""
    trained = torch.tensor([[True, False, False, True]])
    slots = torch.tensor([[True, False, False, True, True]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
    given = AdvantageInputs(
        rewards.sum(1), rewards, slots, trained, slots * 0.0, None, 1, 1.0, 0.9, None, lam_alpha=1.0
    )
    # two tokens: lambda = 1 - 1 / 2
    assert_close(gae(given).advantages, torch.tensor([[0.25, 0.0, 0.0, 0.5]]))


def of_groups(*rewards: float, lengths: tuple[int, ...] = (1, 1, 1, 1)) -> AdvantageInputs:
    """Responses in groups of two, the score at the last token; nan and length 0: not scored."""
    mask = torch.arange(3) < torch.tensor(lengths)[:, None]
    columns = torch.tensor(rewards)[:, None] * torch.tensor([1.0, 0.0, 0.0])
    return AdvantageInputs(torch.tensor(rewards), columns, mask, mask, None, None, 2, 1.0, 1.0)


def advantages_of(name: str, given: AdvantageInputs) -> list[float]:
    return [round(value, 5) for value in ESTIMATORS[name](given).advantages[:, 0].tolist()]


def test_opo_weighs_the_baseline_by_length() -> None:
    # (1 * 3 + 0 * 1) / 4 = 0.75; the second group has one response alone
    given = of_groups(1.0, 0.0, 1.0, nan, lengths=(3, 1, 2, 0))
    assert advantages_of("opo", given) == [0.25, -0.75, 0.0, 0.0]


def test_gpg_makes_up_for_responses_without_a_reward_in_the_whole_batch() -> None:
    # means 0.5 and 0; 4 responses / 1 that is not 0
    given = of_groups(1.0, 0.0, 0.0, 0.0)
    assert advantages_of("gpg", given) == [2.0, -2.0, 0.0, 0.0]
    # another replica has 4 responses, 3 of them with a reward: 8 / 4
    both = replace(given, sum_over_replicas=lambda sums: sums + torch.tensor([4.0, 3.0]))
    assert advantages_of("gpg", both) == [1.0, -1.0, 0.0, 0.0]


def test_grpo_batch_divides_by_the_deviation_of_the_batch() -> None:
    # rewards 1 0 4 3: mean 2, squares 1 4 4 1, variance 10 / 3
    std = (10 / 3) ** 0.5
    expected = [round(value / std, 5) for value in (0.5, -0.5, 0.5, -0.5)]
    assert advantages_of("grpo_batch", of_groups(1.0, 0.0, 4.0, 3.0)) == expected
    assert advantages_of("grpo_batch", of_groups(1.0, 1.0, 1.0, 1.0)) == [0.0] * 4
