"""Masked mean and whitening, on one process and over several ranks."""

import pytest
import torch
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.masked import masked_mean, masked_whiten


@pytest.mark.parametrize(("shift_mean", "mean"), [(True, 0.0), (False, 3.0)])
def test_whitening_of_three_values_by_hand(shift_mean: bool, mean: float) -> None:
    # 1, 2, 6: mean 3, squared deviations 4 + 1 + 9 = 14, divisor 2: variance 7
    values = torch.tensor([1.0, 2.0, 6.0, 99.0])
    mask = torch.tensor([True, True, True, False])
    white = masked_whiten(values, mask, shift_mean=shift_mean)
    assert_close(white, torch.tensor([-2.0, -1.0, 3.0, 0.0]) / 7**0.5 + mean * mask)


def test_whitening_sums_over_ranks() -> None:
    # the three values above, of which another rank has the last: counts and sums, then deviations
    other = iter([torch.tensor([1.0, 6.0]), torch.tensor(9.0)])
    white = masked_whiten(
        torch.tensor([1.0, 2.0]), torch.ones(2).bool(), lambda tensor: tensor + next(other)
    )
    assert_close(white, torch.tensor([-2.0, -1.0]) / 7**0.5)


def test_whitening_keeps_small_spread_around_a_large_mean() -> None:
    # fp32 sums of squares would lose this: 1e4 +- 1e-2
    values = torch.tensor([1e4 - 0.01, 1e4 + 0.01])
    white = masked_whiten(values, torch.ones(2, dtype=torch.bool))
    assert_close(white.abs(), torch.full((2,), 2**-0.5), rtol=1e-3, atol=0)


def test_one_token_cannot_be_whitened_and_none_needs_not() -> None:
    with pytest.raises(ValueError, match="at least two tokens"):
        masked_whiten(torch.ones(3), torch.arange(3) < 1)
    assert not masked_whiten(torch.ones(3), torch.zeros(3).bool()).any()


def test_masked_mean_counts_true_places_only() -> None:
    values = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert_close(masked_mean(values, mask, dim=1), torch.tensor([1.5, 4.0]))
