"""Samples of equal count and nearly equal cost for each data-parallel rank."""

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.balance import (
    PER_RANK,
    RANKS,
    largest,
    largest_greedy,
    largest_karmarkar_karp,
    stored_costs,
)
from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.data.mini_batches import balanced_partitions, sample_flops

SMALL = ArchitectureConfig(
    num_layers=3, hidden_size=4, ffn_hidden_size=8, num_attention_heads=2, num_query_groups=1,
    vocab_size=10, max_position_embeddings=16,
)  # fmt: skip


def test_flops_by_hand() -> None:
    """Heads 2 x 2, keys 1 x 2: weights 4 (4 + 2 + 2) + 4 x 4 = 48 and 3 x 4 x 8 = 96, so
    2 x 5 x 144 + 2 x 4 x 25 = 1640 in each of three layers; logits 2 x 2 x 4 x 10 = 160."""
    assert sample_flops(SMALL, 5, 2) == 3 * 1640 + 160
    assert sample_flops(SMALL, 5, 0) == 3 * 1640
    moe = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 6}
    experts = SMALL.model_copy(update=moe)
    # 48 + 2 x 3 x 4 x 6 = 192 weights, of the two experts that compute a token
    assert sample_flops(experts, 5, 0) == 3 * (2 * 5 * 192 + 200)


def test_an_exchange_improves_the_longest_first_assignment() -> None:
    """Longest first: 8 5 | 7 6 are 13 each, 4 to the first, 1 to the second: 17 | 14. An exchange
    of 8 and 7 makes 16 | 15, the best that a sum of 31 allows."""
    costs = [8, 7, 6, 5, 4, 1]
    assert largest_greedy(costs, 2) == 17
    partitions = balanced_partitions(costs, 2)
    assert [len(partition) for partition in partitions] == [3, 3]
    assert largest(costs, partitions) == 16


def test_items_of_equal_cost_keep_their_order() -> None:
    assert balanced_partitions([5] * 6, 3) == [[0, 1], [2, 3], [4, 5]]
    assert balanced_partitions([9, 1, 5, 5, 1, 9], 3) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("ranks", RANKS)
def test_stored_lengths_are_balanced_as_by_the_better_of_two_references(ranks: int) -> None:
    costs = stored_costs(ranks * PER_RANK)
    in_order = [range(i * PER_RANK, (i + 1) * PER_RANK) for i in range(ranks)]
    assert largest(costs, in_order) > 1.15 * sum(costs) / ranks
    ours = largest(costs, balanced_partitions(costs, ranks))
    assert ours <= 1.05 * sum(costs) / ranks
    assert ours <= 1.02 * min(largest_greedy(costs, ranks), largest_karmarkar_karp(costs, ranks))


@settings(max_examples=100, deadline=None)
@given(ranks=st.integers(1, 9), size=st.integers(1, 12), data=st.data())
def test_every_item_is_once_in_parts_of_one_size_no_worse_than_greedy(
    ranks: int, size: int, data: st.DataObject
) -> None:
    count = ranks * size
    lengths = data.draw(st.lists(st.integers(1, 10_000), min_size=count, max_size=count))
    costs = [sample_flops(SMALL, n, n // 2) for n in lengths]
    partitions = balanced_partitions(costs, ranks)
    assert sorted(item for partition in partitions for item in partition) == list(range(count))
    assert {len(partition) for partition in partitions} == {size}
    assert partitions == balanced_partitions(costs, ranks) and all(
        partition == sorted(partition) for partition in partitions
    )
    assert largest(costs, partitions) <= largest_greedy(costs, ranks)
