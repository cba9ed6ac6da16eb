"""The sums that check arrived weights are exact, on devices without wide integers too."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_rlxf.rollout import transfer
from mindspeed_rlxf.rollout.transfer import EXACT, bit_sum
from tests.unit.rollout.on_device import on_device

DTYPES = (torch.bfloat16, torch.float32)


def of_bits(random: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Numbers of any bit pattern, nan among them."""
    return torch.from_numpy(random.astype(np.int64)).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [2, 2 * EXACT, 7 * EXACT + 10])
def test_the_sum_is_that_of_whole_numbers(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, count: int
) -> None:
    monkeypatch.setattr(transfer, "SUMMED_AT_ONCE", 3 * EXACT - 1)
    random = np.random.default_rng(count)
    for patterns in (
        random.integers(-(2**15), 2**15, count),
        np.full(count, -(2**15)),  # 512 of them are -2^24, the last sum that fp32 has exactly
        np.full(count, 2**15 - 1),
    ):
        tensor = of_bits(patterns, dtype)
        if dtype is torch.bfloat16:
            expected = int(patterns.sum())
        else:  # lower half first
            expected = int(patterns[::2].sum()) + 2**16 * int(patterns[1::2].sum())
        assert bit_sum(tensor) == expected
        assert bit_sum(on_device(tensor)) == expected
        columns = tensor.repeat(2, 1)[:, len(tensor) // 2 :]
        assert bit_sum(columns) == bit_sum(columns.reshape(-1))


@hypothesis.given(st.sampled_from(DTYPES), st.integers(0, 2**32 - 1), st.data())
def test_a_number_that_changes_changes_the_sum(
    dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    """Also where its bytes or halves change places."""
    random = np.random.default_rng(seed)
    patterns = random.integers(-(2**15), 2**15, 600)
    before = of_bits(patterns, dtype)
    halves = before.element_size() // 2
    number = data.draw(st.integers(0, before.numel() - 1)) * halves
    new = data.draw(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=halves, max_size=halves))
    old = patterns[number : number + halves].copy()
    for other in (np.array(new), old[::-1], old.astype(np.int16).byteswap()):
        patterns[number : number + halves] = other
        same = (other == old).all()
        assert (bit_sum(of_bits(patterns, dtype)) == bit_sum(before)) == same
