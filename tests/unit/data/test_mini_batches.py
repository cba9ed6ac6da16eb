"""Which samples make up each step, whatever the number of data-parallel ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rlxf.data.mini_batches import RankSteps, mini_batch_order, rank_steps


def samples_of(shares: list[RankSteps], step: int) -> list[int]:
    """The samples of one optimizer step, over the ranks in order."""
    return [share.rows[position] for share in shares for position in share.steps[step]]


@settings(max_examples=60, deadline=None)
@given(
    num_ranks=st.sampled_from([1, 2, 4]),
    share=st.integers(1, 3),
    mini_batches=st.integers(1, 4),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_every_epoch_has_every_sample_once_in_steps_that_ranks_do_not_change(
    num_ranks: int, share: int, mini_batches: int, epochs: int, shuffle: bool
) -> None:
    size = share * num_ranks
    total = size * mini_batches
    orders = mini_batch_order(total, epochs, shuffle, seed=3, iteration=5)
    shares = rank_steps(orders, size, num_ranks)
    (alone,) = rank_steps(orders, size, 1)
    assert alone.rows == list(range(total))
    for rank in shares:
        assert len(rank.steps) == epochs * mini_batches
        assert {len(step) for step in rank.steps} == {share}
        assert rank.rows == sorted(set(rank.rows))
    for epoch in range(epochs):
        steps = range(epoch * mini_batches, (epoch + 1) * mini_batches)
        seen = [row for step in steps for row in samples_of(shares, step)]
        assert sorted(seen) == list(range(total))
    for step in range(epochs * mini_batches):
        assert samples_of(shares, step) == samples_of([alone], step)


def test_steps_by_hand() -> None:
    # mini-batches [5 3 | 1 0] [4 2 | 7 6], two ranks with two samples each
    first, second = rank_steps([[5, 3, 1, 0, 4, 2, 7, 6]], 4, 2)
    assert first == RankSteps(rows=[2, 3, 4, 5], steps=[[3, 1], [2, 0]])
    assert second == RankSteps(rows=[0, 1, 6, 7], steps=[[1, 0], [3, 2]])


def test_without_shuffle_the_order_is_that_of_the_samples() -> None:
    assert mini_batch_order(4, 2, False, seed=1, iteration=1) == [[0, 1, 2, 3]] * 2


def test_shuffled_orders_follow_from_seed_iteration_and_epoch() -> None:
    def order(seed: int, iteration: int) -> list[list[int]]:
        return mini_batch_order(30, 2, True, seed, iteration)

    first, second = order(1, 1)
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second
    assert order(1, 1) == [first, second]
    assert order(2, 1)[0] != first and order(1, 2)[0] != first


@pytest.mark.parametrize(("size", "ranks"), [(4, 3), (4, 1)])
def test_uneven_mini_batches_are_refused(size: int, ranks: int) -> None:
    with pytest.raises(AssertionError, match="checked beforehand"):
        rank_steps([list(range(6))], size, ranks)


def test_neighbours_that_belong_together_stay_together() -> None:
    (order,) = mini_batch_order(12, 1, True, seed=1, iteration=2, together=2)
    assert sorted(order) == list(range(12)) and order != list(range(12))
    assert all(b == a + 1 and a % 2 == 0 for a, b in zip(order[::2], order[1::2], strict=True))
