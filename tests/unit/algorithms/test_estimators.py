"""Every advantage estimator is known everywhere that names one."""

import torch
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.advantages import length_adaptive_lambda
from mindspeed_rlxf.algorithms.estimators import Rewarded, gae


def test_lambda_grows_with_the_length_of_the_response() -> None:
    # VAPO's alpha of 0.05: 1 - 1 / 5, 1 - 1 / 50, and 0 where 0.05 l < 1
    found = length_adaptive_lambda(torch.tensor([100, 1000, 20, 3]), 0.05)
    assert_close(found, torch.tensor([0.8, 0.98, 0.0, 0.0]))


def two_responses(**lambdas: float) -> Rewarded:
    """Of four tokens and of two; a reward of 1 at the end, values of 0.1 at every token."""
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    keys = {"lam": 0.2, **lambdas}
    return Rewarded(
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
    given = Rewarded(
        rewards.sum(1), rewards, slots, trained, slots * 0.0, None, 1, 1.0, 0.9, None, lam_alpha=1.0
    )
    # two tokens: lambda = 1 - 1 / 2
    assert_close(gae(given).advantages, torch.tensor([[0.25, 0.0, 0.0, 0.5]]))
