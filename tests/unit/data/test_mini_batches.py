"""Which samples make up each step, whatever the number of data-parallel ranks."""

from hypothesis import given, settings, strategies as st

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


def test_shuffled_orders_follow_from_seed_iteration_and_epoch() -> None:
    def order(seed: int, iteration: int) -> list[list[int]]:
        return mini_batch_order(30, 2, True, seed, iteration)

    first, second = order(1, 1)
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second
    assert order(1, 1) == [first, second]
    assert order(2, 1)[0] != first and order(1, 2)[0] != first


@settings(max_examples=60, deadline=None)
@given(
    num_ranks=st.sampled_from([1, 2, 4]),
    share=st.integers(1, 3),
    mini_batches=st.integers(1, 3),
    together=st.integers(1, 3),
    data=st.data(),
)
def test_balanced_steps_hold_the_same_samples_and_whole_groups(
    num_ranks: int, share: int, mini_batches: int, together: int, data: st.DataObject
) -> None:
    size = share * num_ranks * together
    total = size * mini_batches
    costs = data.draw(st.lists(st.integers(1, 99), min_size=total, max_size=total))
    orders = mini_batch_order(total, 2, True, seed=3, iteration=5, group_size=together)
    shares = rank_steps(orders, size, num_ranks, costs, together)
    (alone,) = rank_steps(orders, size, 1)
    for step in range(2 * mini_batches):
        whole = samples_of([alone], step)
        assert sorted(samples_of(shares, step)) == sorted(whole)
        place = {sample: i for i, sample in enumerate(whole)}
        for rank in shares:
            places = [place[rank.rows[position]] for position in rank.steps[step]]
            assert len(places) == share * together
            assert places == sorted(places), "the order of the mini-batch"
            for start in range(0, len(places), together):
                group = places[start : start + together]
                assert group[0] % together == 0
                assert group == list(range(group[0], group[0] + together))
