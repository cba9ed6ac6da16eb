"""Masked mean and whitening, on one process and over several ranks."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.masked import AllReduce, masked_mean, masked_whiten


def on_ranks(count: int, work: Callable[[int, AllReduce], Any]) -> list[Any]:
    """`work(rank, all_reduce)` on threads whose all_reduce adds their tensors up."""
    meeting = threading.Barrier(count, timeout=10)
    slots: list[Tensor] = [torch.empty(0)] * count

    def rank(index: int) -> Any:
        def all_reduce(tensor: Tensor) -> Tensor:
            slots[index] = tensor
            meeting.wait()
            total = torch.stack(slots).sum(0)
            meeting.wait()
            return total

        return work(index, all_reduce)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(rank, range(count)))


def random_batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, 6, generator=generator) * 3 + 5
    return values, torch.rand(rows, 6, generator=generator) < 0.6


@pytest.mark.parametrize(("shift_mean", "mean"), [(True, 0.0), (False, 3.0)])
def test_whitening_of_three_values_by_hand(shift_mean: bool, mean: float) -> None:
    # 1, 2, 6: mean 3, squared deviations 4 + 1 + 9 = 14, divisor 2: variance 7
    values = torch.tensor([1.0, 2.0, 6.0, 99.0])
    mask = torch.tensor([True, True, True, False])
    white = masked_whiten(values, mask, shift_mean=shift_mean)
    assert_close(white, torch.tensor([-2.0, -1.0, 3.0, 0.0]) / 7**0.5 + mean * mask)


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 9), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_whitening_does_not_depend_on_the_spread_over_ranks(cuts: list[int], seed: int) -> None:
    values, mask = random_batch(9, seed)
    bounds = [0, *sorted(cuts), 9]
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    spread = on_ranks(
        len(parts),
        lambda rank, all_reduce: masked_whiten(values[parts[rank]], mask[parts[rank]], all_reduce),
    )
    assert_close(torch.cat(spread), masked_whiten(values, mask), rtol=1e-6, atol=1e-7)


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
    assert_close(masked_mean(values, mask), torch.tensor(7 / 3))
    assert_close(masked_mean(values, mask, dim=1), torch.tensor([1.5, 4.0]))


def test_whitening_equal_values_gives_zeros() -> None:
    assert not masked_whiten(torch.full((4,), 3.0), torch.ones(4, dtype=torch.bool)).any()
