"""How token losses are averaged, against loops over responses."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.losses import LossOutput, normalised_loss
from mindspeed_rlxf.config.enums import LossNormalizer

MAX_NEW_TOKENS = 8


def output_of(
    loss: Tensor, lengths: list[int], normalizer: LossNormalizer, coefficient: float = 1.0
) -> LossOutput:
    """`part` is reported as the loss is, `each` token by token."""
    metrics = {"part": loss}, {"each": loss}
    counts = torch.tensor(lengths)
    return normalised_loss(loss, counts, normalizer, MAX_NEW_TOKENS, *metrics, coefficient)


def reported(output: LossOutput, name: str) -> float:
    return float(output.metrics[name].total) / output.metrics[name].weight


@pytest.mark.parametrize(
    ("normalizer", "loss", "weight", "part"),
    [
        # losses 1, 2, 6 of responses of 2 and 1 of at most 8 tokens; coefficient 0.5
        (LossNormalizer.MINIBATCH_TOKENS, 0.5 * 9, 3, 3.0),
        (LossNormalizer.MICRO_BATCH_MEAN, 0.5 * 3, 1, 3.0),
        (LossNormalizer.SEQUENCE_MEANS, 0.5 * (1.5 + 6), 2, 3.75),
        (LossNormalizer.SEQUENCE_SUMS, 0.5 * (3 / 8 + 6 / 8), 2, 9 / 16),
        (LossNormalizer.SEQUENCE_TOTALS, 0.5 * (3 + 6), 2, 4.5),
    ],
)
def test_losses_are_averaged_by_hand(
    normalizer: LossNormalizer, loss: float, weight: int, part: float
) -> None:
    output = output_of(torch.tensor([1.0, 2, 6], requires_grad=True), [2, 1], normalizer, 0.5)
    assert (float(output.loss.detach()), output.weight) == (loss, weight)
    # metrics without the coefficient and without gradient
    assert (reported(output, "part"), reported(output, "each")) == (part, 3.0)
    assert not output.metrics["part"].total.requires_grad


def slow(loss: list[float], lengths: list[int], normalizer: LossNormalizer) -> float:
    """The loss of a whole mini-batch, by its definition."""
    responses: list[list[float]] = []
    rest = list(loss)
    for length in lengths:
        responses.append(rest[:length])
        rest = rest[length:]
    responses = [response for response in responses if response]
    if normalizer is LossNormalizer.MINIBATCH_TOKENS:
        return sum(loss) / len(loss)
    if normalizer is LossNormalizer.SEQUENCE_MEANS:
        return sum(sum(r) / len(r) for r in responses) / len(responses)
    return sum(sum(r) / MAX_NEW_TOKENS for r in responses) / len(responses)


@pytest.mark.parametrize(
    "normalizer",
    [LossNormalizer.MINIBATCH_TOKENS, LossNormalizer.SEQUENCE_MEANS, LossNormalizer.SEQUENCE_SUMS],
)
@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(
        st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=4
    ).filter(lambda parts: any(map(sum, parts))),
    seed=st.integers(0, 2**16),
)
def test_micro_batches_change_neither_loss_nor_gradient(
    normalizer: LossNormalizer, parts: list[list[int]], seed: int
) -> None:
    """Sums over the sum of weights, as the schedule divides them, of any split into parts.

    A response without tokens, which could not be scored, does not count.
    """
    generator = torch.Generator().manual_seed(seed)
    count = sum(map(sum, parts))
    leaf = torch.randn(count, generator=generator, dtype=torch.float64).requires_grad_()
    outputs, start = [], 0
    for lengths in parts:
        tokens = leaf[start : start + sum(lengths)]
        outputs.append(output_of(tokens * 1.0, lengths, normalizer))
        start += sum(lengths)
    total: Any = sum(o.loss for o in outputs) / sum(o.weight for o in outputs)
    everything = [length for lengths in parts for length in lengths]
    assert float(total) == pytest.approx(slow(leaf.tolist(), everything, normalizer))
    (got,) = torch.autograd.grad(total, leaf)
    whole = output_of(leaf * 1.0, everything, normalizer)
    (expected,) = torch.autograd.grad(whole.loss / whole.weight, leaf)
    assert_close(got, expected)


@pytest.mark.parametrize("normalizer", LossNormalizer)
def test_a_micro_batch_without_tokens_has_no_weight(normalizer: LossNormalizer) -> None:
    loss = torch.zeros(0, requires_grad=True)
    output = output_of(loss * 1.0, [0, 0], normalizer)
    assert (float(output.loss.detach()), output.weight) == (0.0, 0)
    assert [metric.weight for metric in output.metrics.values()] == [0, 0]
