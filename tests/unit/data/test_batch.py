"""Rows: selection, splitting and joining along the sample axis."""

from dataclasses import dataclass

import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.testing import assert_close

from mindspeed_rlxf.data.batch import Rows


@dataclass(frozen=True)
class Sample(Rows):
    names: list[str]
    ids: Tensor  # [batch, width] int64
    scores: Tensor  # [batch] fp32
    mask: Tensor  # [batch, width] bool


def sample(rows: int, width: int, first: int = 0) -> Sample:
    numbers = torch.arange(first, first + rows)
    ids = numbers[:, None] * 10 + torch.arange(1, width + 1)
    names = [str(n) for n in numbers.tolist()]
    return Sample(names, ids, numbers.float(), torch.ones(rows, width, dtype=torch.bool))


def assert_equal(got: Sample, expected: Sample) -> None:
    assert got.names == expected.names
    for name in ("ids", "scores", "mask"):
        assert_close(getattr(got, name), getattr(expected, name), rtol=0, atol=0)


def test_select_takes_rows_in_the_order_asked_for() -> None:
    got = sample(4, 2).select([3, 0, 3])
    assert got.num_rows == 3 and got.names == ["3", "0", "3"]
    assert got.ids.tolist() == [[31, 32], [1, 2], [31, 32]]
    assert got.scores.tolist() == [3.0, 0.0, 3.0]
    none = sample(4, 2).select([])
    assert none.num_rows == 0 and none.names == []
    assert none.ids.shape == (0, 2) and none.mask.dtype == torch.bool


def test_joining_pads_narrower_parts_with_zeros() -> None:
    got = Sample.concat([sample(1, 2), sample(1, 3, first=1), sample(1, 1, first=2)])
    assert got.names == ["0", "1", "2"]
    assert got.ids.tolist() == [[1, 2, 0], [11, 12, 13], [21, 0, 0]]
    assert got.mask.tolist() == [[True, True, False], [True] * 3, [True, False, False]]
    assert got.ids.dtype == torch.int64 and got.mask.dtype == torch.bool


@given(rows=st.integers(0, 12), parts=st.integers(1, 6))
def test_split_parts_are_even_and_join_to_the_whole(rows: int, parts: int) -> None:
    whole = sample(rows, 3)
    pieces = whole.split(parts)
    sizes = [piece.num_rows for piece in pieces]
    assert len(pieces) == parts and max(sizes) - min(sizes) <= 1
    assert_equal(Sample.concat(pieces), whole)
