"""Which world (process group) each rank of a pool belongs to.

Transfers between worlds need several processes: `tests/distributed/test_split.py`.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from mindspeed_rlxf.device import worlds


@pytest.fixture
def no_world() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    worlds.leave()
    assert not dist.is_initialized()


def test_ranks_count_from_the_first_of_their_subpool():
    places = [worlds.subpool_rank(rank, (3, 1, 2)) for rank in range(6)]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    with pytest.raises(AssertionError, match="rank 6 is beyond the sub-pools"):
        worlds.subpool_rank(6, (3, 1, 2))


def test_a_pool_of_one_subpool_is_one_world_without_another_group(no_world):
    worlds.join("gloo", dist.HashStore(), 0, (1,), timedelta(seconds=20))
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert worlds.weights_group() is None


def test_a_layout_is_made_once_and_its_users_do_not_see_each_others_changes():
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(1)
        return {"tp": object()}

    worlds.leave()
    one = worlds.groups_of_layout((2, 1, 1), make)
    one["rank"] = 1
    assert worlds.groups_of_layout((2, 1, 1), make) == {"tp": one["tp"]} and len(made) == 1
    worlds.groups_of_layout((1, 2, 1), make)
    worlds.leave()
    worlds.groups_of_layout((2, 1, 1), make)
    assert len(made) == 3
    worlds.leave()
