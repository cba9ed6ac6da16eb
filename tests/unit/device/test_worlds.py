"""Which world a rank of a pool belongs to; what passes between worlds is a matter of several
processes (`tests/distributed/test_split.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from mindspeed_rlxf.device import worlds


@pytest.fixture
def no_world() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    worlds.leave()
    assert not dist.is_initialized()


def test_ranks_count_from_the_first_of_their_part() -> None:
    places = [worlds.part_rank(rank, (3, 1, 2)) for rank in range(6)]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    with pytest.raises(AssertionError, match="rank 6 is beyond the parts"):
        worlds.part_rank(6, (3, 1, 2))


def test_a_pool_of_one_part_is_one_world_without_another_group(no_world: None) -> None:
    worlds.join("gloo", dist.HashStore(), 0, (1,), timedelta(seconds=20))
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    with pytest.raises(AssertionError, match="is not split"):
        worlds.whole_pool()
