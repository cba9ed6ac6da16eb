from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.losses import clipped_policy_loss, clipped_value_loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "gradient"),
    [
        # clip 0.2: the ratio is held within 0.8 .. 1.2; d(-A r) / d log_prob = -A r
        (1.5, 2.0, -2.4, True, 0.0),  # max(-3, -2.4): no more reward for going further up
        (1.5, -2.0, 3.0, False, 3.0),  # max(3, 2.4): may come back down
        (0.5, 2.0, -1.0, False, -1.0),  # max(-1, -1.6): may come back up
        (0.5, -2.0, 1.6, True, 0.0),  # max(1, 1.6)
        (1.1, 2.0, -2.2, False, -2.2),  # inside, both terms agree
        (0.9, -2.0, 1.8, False, 1.8),
        (1.0, 2.0, -2.0, False, -2.0),  # on policy: the plain policy gradient
        (1.0, 0.0, 0.0, False, 0.0),
    ],
)
def test_policy_loss_by_hand(
    ratio: float, advantage: float, loss: float, clipped: bool, gradient: float
) -> None:
    old = torch.tensor([-1.5])
    log_probs = (old + math.log(ratio)).requires_grad_()
    token = clipped_policy_loss(log_probs, old, torch.tensor([advantage]), 0.2)
    (slope,) = torch.autograd.grad(token.loss.sum(), log_probs)
    assert_close(token.loss.detach(), torch.tensor([loss]))
    assert token.clipped.tolist() == [clipped]
    assert_close(slope, torch.tensor([gradient]))


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped", "gradient"),
    [
        # clip 0.5: v_clip within 0.5 of the old value; d 0.5 (v - R)^2 / dv = v - R
        (1.2, 1.0, 0.0, 0.72, False, 1.2),  # inside: 0.5 * 1.44
        (2.0, 1.0, 3.0, 1.125, True, 0.0),  # moved 1 towards R, held at 1.5: 0.5 * 2.25
        (2.0, 1.0, 0.0, 2.0, False, 2.0),  # moved away from R: the larger error counts
        (0.0, 1.0, -1.0, 1.125, True, 0.0),  # held at 0.5 from below
        (0.0, 1.0, 3.0, 4.5, False, -3.0),
    ],
)
def test_value_loss_by_hand(
    value: float, old: float, target: float, loss: float, clipped: bool, gradient: float
) -> None:
    values = torch.tensor([value]).requires_grad_()
    token = clipped_value_loss(values, torch.tensor([old]), torch.tensor([target]), 0.5)
    (slope,) = torch.autograd.grad(token.loss.sum(), values)
    assert_close(token.loss.detach(), torch.tensor([loss]))
    assert token.clipped.tolist() == [clipped]
    assert_close(slope, torch.tensor([gradient]))


def test_losses_are_per_token() -> None:
    logs = torch.zeros(4)
    assert clipped_policy_loss(logs, logs, torch.randn(4), 0.2).loss.shape == (4,)
    assert clipped_value_loss(logs, logs, torch.randn(4), 0.2).loss.shape == (4,)


def test_values_within_the_range_are_not_clipped_whatever_the_rounding() -> None:
    # old + (v - old) is not v in floating point
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 10000, generator=generator).clamp(-2, 2) / 9
    values.requires_grad_()
    token = clipped_value_loss(values, old, returns, 0.5)
    (slope,) = torch.autograd.grad(token.loss.sum(), values)
    assert not token.clipped.any()
    assert_close(slope, (values - returns).detach())
