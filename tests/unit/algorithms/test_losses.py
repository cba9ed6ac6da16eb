"""Policy and value losses against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.losses import (
    POLICY_LOSSES,
    ClipRange,
    TokenLoss,
    clipped_policy_loss,
    clipped_value_loss,
    preference_loss,
    sequence_policy_loss,
    truncated_importance,
)

EQUAL, HIGHER, DUAL = ClipRange(0.2, 0.2), ClipRange(0.2, 0.5), ClipRange(0.2, 0.2, 3.0)


@pytest.mark.parametrize(
    ("clip", "ratio", "advantage", "loss", "clipped", "gradient"),
    [
        # clip 0.2: the ratio is held within 0.8 .. 1.2; d(-A r) / d log_prob = -A r
        (EQUAL, 1.5, 2.0, -2.4, True, 0.0),  # max(-3, -2.4): no more reward for going further up
        (EQUAL, 1.5, -2.0, 3.0, False, 3.0),  # max(3, 2.4): may come back down
        (EQUAL, 0.5, 2.0, -1.0, False, -1.0),  # max(-1, -1.6): may come back up
        (EQUAL, 0.5, -2.0, 1.6, True, 0.0),  # max(1, 1.6)
        (EQUAL, 1.1, 2.0, -2.2, False, -2.2),  # inside, both terms agree
        (EQUAL, 0.9, -2.0, 1.8, False, 1.8),
        (EQUAL, 1.0, 2.0, -2.0, False, -2.0),  # on policy: the plain policy gradient
        (EQUAL, 1.0, 0.0, 0.0, False, 0.0),
        # clip-higher, 0.2 below and 0.5 above: more room for unlikely tokens to become likely
        (HIGHER, 1.4, 2.0, -2.8, False, -2.8),
        (HIGHER, 1.6, 2.0, -3.0, True, 0.0),  # held at 1.5
        (HIGHER, 0.7, -2.0, 1.6, True, 0.0),  # held at 0.8, as with a symmetric clip
        # dual clip 3: the loss of a negative advantage is at most 3 |A|
        (DUAL, 2.0, -2.0, 4.0, False, 4.0),
        (DUAL, 5.0, -2.0, 6.0, True, 0.0),  # 10 without the bound
        (DUAL, 0.5, -2.0, 1.6, True, 0.0),  # the usual clip
        (DUAL, 5.0, 2.0, -2.4, True, 0.0),  # positive advantages have their own
    ],
)
def test_policy_loss_by_hand(
    clip: ClipRange, ratio: float, advantage: float, loss: float, clipped: bool, gradient: float
) -> None:
    old = torch.tensor([-1.5])
    log_probs = (old + math.log(ratio)).requires_grad_()
    token = clipped_policy_loss(log_probs, old, torch.tensor([advantage]), clip)
    (slope,) = torch.autograd.grad(token.loss.sum(), log_probs)
    assert_close(token.loss.detach(), torch.tensor([loss]))
    assert token.clipped.tolist() == [clipped]
    assert_close(slope, torch.tensor([gradient]))


@pytest.mark.parametrize("by_response", [False, True])
@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        # exp(95) is inf in fp32, and 0 * inf, the slope of a clipped loss, NaN
        (95.0, 1.0, -1.2, 0.0),
        (95.0, -1.0, math.exp(20), 0.0),  # held at 20: no slope
        (-95.0, 1.0, -math.exp(-20), 0.0),
        (19.0, -1.0, math.exp(19), math.exp(19)),  # inside as ever
        (-19.0, 1.0, -math.exp(-19), -math.exp(-19)),
        (math.nan, 1.0, math.nan, 0.0),  # the loss says that something is wrong
    ],
)
def test_log_ratios_are_bounded(
    log_ratio: float, advantage: float, loss: float, gradient: float, by_response: bool
) -> None:
    log_probs, old = torch.zeros(2).requires_grad_(), torch.full((2,), -log_ratio)
    arguments = log_probs, old, torch.full((2,), advantage), ClipRange(0.2, 0.2)
    if by_response:
        token = sequence_policy_loss(*arguments, torch.tensor([2]))
    else:
        token = clipped_policy_loss(*arguments)
    (slope,) = torch.autograd.grad(token.loss.sum(), log_probs)
    assert_close(token.loss.detach(), torch.full((2,), loss), equal_nan=True)
    assert_close(slope, torch.full((2,), gradient))


@pytest.mark.parametrize(
    ("clip", "value", "old", "target", "loss", "clipped", "gradient"),
    [
        # clip 0.5: v_clip within 0.5 of the old value; d 0.5 (v - R)^2 / dv = v - R
        (0.5, 1.2, 1.0, 0.0, 0.72, False, 1.2),  # inside: 0.5 * 1.44
        (0.5, 2.0, 1.0, 3.0, 1.125, True, 0.0),  # moved 1 towards R, held at 1.5: 0.5 * 2.25
        (0.5, 2.0, 1.0, 0.0, 2.0, False, 2.0),  # moved away from R: the larger error counts
        (0.5, 0.0, 1.0, -1.0, 1.125, True, 0.0),  # held at 0.5 from below
        (0.5, 0.0, 1.0, 3.0, 4.5, False, -3.0),
        (None, 9.0, 0.0, 10.0, 0.5, False, -1.0),
    ],
)
def test_value_loss_by_hand(
    clip: float | None,
    value: float,
    old: float,
    target: float,
    loss: float,
    clipped: bool,
    gradient: float,
) -> None:
    values = torch.tensor([value]).requires_grad_()
    token = clipped_value_loss(values, torch.tensor([old]), torch.tensor([target]), clip)
    (slope,) = torch.autograd.grad(token.loss.sum(), values)
    assert_close(token.loss.detach(), torch.tensor([loss]))
    assert token.clipped.tolist() == [clipped]
    assert_close(slope, torch.tensor([gradient]))


def test_values_within_the_range_are_not_clipped_whatever_the_rounding() -> None:
    # old + (v - old) is not v in floating point
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 10000, generator=generator).clamp(-2, 2) / 9
    values.requires_grad_()
    token = clipped_value_loss(values, old, returns, 0.5)
    (slope,) = torch.autograd.grad(token.loss.sum(), values)
    assert not token.clipped.any()
    assert_close(slope, (values - returns).detach())


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**16))
def test_sequence_ratio_equals_a_loop_over_responses(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    old = -torch.rand(count, generator=generator, dtype=torch.float64)
    moved = 0.4 * torch.randn(count, generator=generator, dtype=torch.float64)
    log_probs = (old + moved).requires_grad_()
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    clip = ClipRange(0.1, 0.15)
    token = sequence_policy_loss(log_probs, old, advantages, clip, torch.tensor(lengths))
    (slope,) = torch.autograd.grad(token.loss.sum(), log_probs)
    losses, start = token.loss.tolist(), 0
    for length in lengths:
        part = slice(start, start + length)
        ratio = math.exp(sum(moved[part].tolist()) / length)
        held = min(max(ratio, 0.9), 1.15)
        for place in range(start, start + length):
            a = float(advantages[place])
            is_clipped = -a * held > -a * ratio
            assert losses[place] == pytest.approx(max(-a * ratio, -a * held), rel=1e-9)
            assert bool(token.clipped[place]) == is_clipped
            # each token's own ratio stands for s * pi / sg(pi): slope -A s
            assert float(slope[place]) == pytest.approx(0 if is_clipped else -a * ratio, rel=1e-9)
        start += length


def test_importance_of_a_token_is_cut_above_only() -> None:
    training = torch.log(torch.tensor([0.4, 0.1, 0.2])).requires_grad_()
    rollout = torch.log(torch.tensor([0.1, 0.4, 0.2]))
    weights = truncated_importance(training, rollout, 2.0)
    assert_close(weights, torch.tensor([2.0, 0.25, 1.0]))  # ratios 4, 1/4, 1
    assert not weights.requires_grad
    masked = truncated_importance(training, rollout, 2.0, 0.5)
    assert masked.tolist() == [2.0, 0.0, 1.0]
    far = truncated_importance(torch.tensor([95.0, -95.0, math.nan]), torch.zeros(3), 1e30)
    assert_close(far, torch.tensor([20.0, -20.0, math.nan]).exp(), equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "chosen", "rejected", "loss", "slope"),
    [
        # beta 0.5, h = chosen - rejected
        ("sigmoid", 0.0, 0.0, math.log(2), -0.25),  # -beta sigmoid(-beta h)
        ("sigmoid", 3.0, 1.0, math.log(1 + math.exp(-1.0)), -0.5 / (1 + math.e)),
        ("ipo", 3.0, 1.0, 1.0, 2.0),  # (2 - 1)^2, slope 2 (2 - 1): the margin is too large
        ("ipo", 0.5, 0.0, 0.25, -1.0),
        ("hinge", 3.0, 2.0, 0.5, -0.5),
        ("hinge", 5.0, 2.0, 0.0, 0.0),  # beyond the margin
    ],
)
def test_preference_loss_by_hand(
    kind: str, chosen: float, rejected: float, loss: float, slope: float
) -> None:
    first = torch.tensor([chosen]).requires_grad_()
    found = preference_loss(first, torch.tensor([rejected]), 0.5, kind)
    (gradient,) = torch.autograd.grad(found.sum(), first)
    assert float(found.detach()) == pytest.approx(loss)
    assert float(gradient) == pytest.approx(slope)


def loss_by_name(
    name: str, ratios: list[float], advantages: list[float], lengths: list[int], **keys: float
) -> tuple[list[float], list[bool], list[float]]:
    """Losses, clipped tokens and slopes of tokens with these ratios; the new log-probs are -1."""
    log_probs = torch.full((len(ratios),), -1.0, requires_grad=True)
    old = log_probs.detach() - torch.tensor(ratios).log()
    clip = ClipRange(0.2, 0.5, **keys)  # type: ignore[arg-type]
    token = POLICY_LOSSES[name](
        log_probs, old, torch.tensor(advantages), clip, torch.tensor(lengths)
    )
    (slope,) = torch.autograd.grad(token.loss.sum(), log_probs, allow_unused=True)
    return token.loss.tolist(), token.clipped.tolist(), slope.tolist()


E_HALF = math.exp(0.5)


@pytest.mark.parametrize(
    ("name", "ratios", "advantages", "losses", "clipped", "slopes"),
    [
        # the ratio is a weight: max 1.5; the loss is -A w log_prob with log_prob -1, the slope -A w
        ("cispo", [1.2, 3.0], [2.0, -1.0], [2.4, -1.5], [False, True], [-2.4, 1.5]),
        ("gpg", [1.2, 3.0], [2.0, -1.0], [2.0, -1.0], [False, False], [-2.0, 1.0]),
        # within [0.8, 1.5] the loss and its slope are -A r, outside 0 whatever the sign of A
        ("dis", [1.2, 1.6, 1.6, 0.7, 0.7, 0.9], [2.0, 2.0, -2.0, 2.0, -2.0, -2.0],
         [-2.4, 0.0, 0.0, 0.0, 0.0, 1.8], [False, True, True, True, True, False],
         [-2.4, 0.0, 0.0, 0.0, 0.0, 1.8]),
        # log-ratios 1 and 0, the first clipped to 0.5: exp(0.25) for both tokens of the response;
        # each loss has the slope -A exp(0.25) / 2 in the second token
        ("geo_mean", [math.e, 1.0], [2.0, 2.0], [-2 * math.exp(0.25)] * 2, [True, False],
         [0.0, -2 * math.exp(0.25)]),
        # with A < 0 the upper clip does not hold: exp((1 + 0) / 2)
        ("geo_mean", [math.e, 1.0], [-2.0, -2.0], [2 * E_HALF] * 2, [False, False],
         [2 * E_HALF, 2 * E_HALF]),
    ],
)  # fmt: skip
def test_further_policy_losses_by_hand(
    name: str, ratios: list[float], advantages: list[float], losses: list[float],
    clipped: list[bool], slopes: list[float],
) -> None:  # fmt: skip
    found = loss_by_name(name, ratios, advantages, [len(ratios)])
    assert_close(torch.tensor(found[0]), torch.tensor(losses))
    assert found[1] == clipped
    assert_close(torch.tensor(found[2]), torch.tensor(slopes))


def test_covariant_tokens_are_left_out_or_held() -> None:
    # Means: A 0, log_prob -1.5. Covariances: 2 * 0.5 = 1, -2 * -1.5 = 3, 0, 0.
    log_probs, advantages = torch.tensor([-1.0, -3.0, -1.0, -1.0]), torch.tensor([2.0, -2, 0, 0])
    old, lengths = log_probs - math.log(1.1), torch.tensor([4])
    clip = ClipRange(0.2, 0.2, covariance_fraction=0.25, kl_coef=0.5)
    left = POLICY_LOSSES["clip_cov"](log_probs, old, advantages, clip, lengths)
    assert left.clipped.tolist() == [False, True, False, False]  # 1 is not above 1
    assert_close(left.loss, torch.tensor([-2.2, 0.0, 0.0, 0.0]))
    held = POLICY_LOSSES["kl_cov"](log_probs, old, advantages, clip, lengths)
    assert held.clipped.tolist() == [False, True, False, False]
    assert_close(held.loss, torch.tensor([-2.2, 2.2 + 0.5 * math.log(1.1), 0.0, 0.0]))


def covariant(
    loss: str, log_ratios: list[float], fraction: float, scale: float = 1.0, **clip: float
) -> TokenLoss:
    """Four tokens of advantages 3 and -3 (times scale), each of covariance 3 x 1 (times scale)."""
    log_probs = torch.tensor([-1.0, -3.0, -1.0, -3.0])
    advantages = scale * torch.tensor([3.0, -3.0, 3.0, -3.0])
    bounds = ClipRange(0.2, 0.2, covariance_fraction=fraction, **clip)
    old = log_probs - torch.tensor(log_ratios)
    return POLICY_LOSSES[loss](log_probs, old, advantages, bounds, torch.tensor([4]))


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_covariant_tokens_are_a_fraction_at_least_one_and_the_same_each_time(loss: str) -> None:
    for fraction, count in ((0.01, 1), (0.5, 2), (1.0, 4)):
        chosen = [covariant(loss, [0.0] * 4, fraction).clipped.tolist() for _ in range(6)]
        assert sum(chosen[0]) == count and chosen == chosen[:1] * 6


def test_clip_cov_chooses_no_clipped_token_and_none_of_high_covariance() -> None:
    clipped = covariant("clip_cov", [0.5, -0.5, 0.5, 0.0], 1.0)
    assert clipped.clipped.tolist() == [False, False, False, True]
    assert not covariant("clip_cov", [0.0] * 4, 1.0, scale=2.0).clipped.any()  # 6 is over 5


def test_clip_cov_has_no_dual_clip() -> None:
    found = covariant("clip_cov", [0.0, 2.0, 0.0, 2.0], 0.01, scale=9.0, dual=3.0)
    assert float(found.loss[1]) == pytest.approx(27 * math.exp(2.0))


def test_kl_cov_holds_a_token_whose_probability_fell_too() -> None:
    found = covariant("kl_cov", [-0.5] * 4, 1.0, kl_coef=0.1)
    assert float(found.loss[0]) == pytest.approx(-3 * math.exp(-0.5) + 0.1 * 0.5)


def test_the_two_bounds_of_cispo_by_hand() -> None:
    log_probs = torch.tensor([-1.0, -1.0])
    old = log_probs - torch.tensor([0.5, 2.0]).log()
    found = POLICY_LOSSES["cispo"](
        log_probs, old, torch.ones(2), ClipRange(0.1, 0.4), torch.ones(2)
    )
    assert_close(found.loss, torch.tensor([0.9, 1.4]))
