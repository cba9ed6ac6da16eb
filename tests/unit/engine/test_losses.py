from __future__ import annotations

import torch
from torch.testing import assert_close

from mindspeed_rlxf.engine.losses import normalised_loss


def test_token_losses_are_summed_and_weighed_by_their_number() -> None:
    loss = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    clipped = torch.tensor([True, False, True])
    output = normalised_loss(loss, {"loss": loss, "clipfrac": clipped}, False, coefficient=0.5)
    assert output.weight == 3
    assert float(output.loss) == 4.5  # 9 * 0.5
    # metrics are sums too, without the coefficient and without gradient
    assert float(output.metrics["loss"]) == 9.0 and float(output.metrics["clipfrac"]) == 2.0
    assert not output.metrics["loss"].requires_grad


def test_mean_of_a_micro_batch_counts_once_whatever_its_length() -> None:
    loss = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    output = normalised_loss(loss, {"loss": loss}, True, coefficient=0.5)
    assert output.weight == 1
    assert float(output.loss) == 1.5 and float(output.metrics["loss"]) == 3.0


def test_gradient_of_a_split_mini_batch_is_that_of_the_whole() -> None:
    # token sums over the sum of weights, as the schedule divides them
    loss = torch.tensor([1.0, -2.0, 6.0, 3.0, 0.5], requires_grad=True)
    whole = normalised_loss(loss.square(), {}, False)
    parts = [normalised_loss(part.square(), {}, False) for part in loss.split((2, 3))]
    assert sum(part.weight for part in parts) == whole.weight
    (expected,) = torch.autograd.grad(whole.loss, loss)
    (got,) = torch.autograd.grad(parts[0].loss + parts[1].loss, loss)
    assert_close(got, expected)
