"""Assign samples to optimizer steps and data-parallel ranks: equal counts, nearly equal cost.

The assignment to steps does not depend on the parallel layout.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_rlxf.config.architecture import ArchitectureConfig


@dataclass(frozen=True)
class RankSteps:
    """One data-parallel rank's samples.

    With samples 0 to 3, mini-batches [0, 1] and [2, 3] and two ranks, the first rank may have
    rows=[0, 2] and steps=[[0], [1]].
    """

    rows: list[int]  # indices into the batch, ascending, each once
    steps: list[list[int]]  # per optimizer step, positions in `rows`


def mini_batch_order(
    num_samples: int, epochs: int, shuffle: bool, seed: int, iteration: int, group_size: int = 1
) -> list[list[int]]:
    """Return the order of sample indices in each epoch: ascending, or shuffled.

    A shuffle derives from (seed, iteration, epoch) alone. `group_size` consecutive samples stay
    together, in order; it must divide num_samples.
    """
    orders = []
    for epoch in range(epochs):
        order = np.arange(num_samples).reshape(-1, group_size)
        if shuffle:
            rng = np.random.default_rng((seed, iteration, epoch))
            order = order[rng.permutation(len(order))]
        orders.append(order.flatten().tolist())
    return orders


def rank_steps(
    orders: list[list[int]],
    mini_batch_size: int,
    num_ranks: int,
    costs: Sequence[float] | None = None,
    group_size: int = 1,
) -> list[RankSteps]:
    """Split each epoch into mini-batches, and each mini-batch into equal shares of the ranks.

    Args:
        orders: [epochs][samples].
        mini_batch_size: divides the sample count, and is a multiple of num_ranks * group_size
            (asserted).
        num_ranks: data-parallel size.
        costs: per sample, to make the shares of nearly equal cost; None = consecutive samples.
        group_size: consecutive samples kept on one rank.

    Returns:
        For each rank its samples over all epochs, ascending and each once, and for each mini-batch
        the rank's samples as positions in that list.
    """
    is_divisible = all(len(order) % mini_batch_size == 0 for order in orders)
    assert is_divisible and mini_batch_size % (num_ranks * group_size) == 0, "checked beforehand"
    mini_batches: list[list[list[int]]] = []  # per optimizer step, the samples of each rank
    for order in orders:
        for start in range(0, len(order), mini_batch_size):
            samples = order[start : start + mini_batch_size]
            if costs is None:
                mini_batches.append(np.reshape(samples, (num_ranks, -1)).tolist())
            else:
                groups = np.reshape(samples, (-1, group_size))
                partitions = balanced_partitions(np.asarray(costs)[groups].sum(1), num_ranks)
                mini_batches.append([groups[indices].flatten().tolist() for indices in partitions])
    ranks = []
    for rank in range(num_ranks):
        rows = sorted(set().union(*(mini_batch[rank] for mini_batch in mini_batches)))
        position_of_row = {row: position for position, row in enumerate(rows)}
        steps = []
        for mini_batch in mini_batches:
            steps.append([position_of_row[row] for row in mini_batch[rank]])
        ranks.append(RankSteps(rows, steps))
    return ranks


def sample_flops(a: ArchitectureConfig, tokens: int, outputs: int) -> int:
    """Return the FLOPs for one forward pass over a sample: A n + B n^2 + C m.

    Two operations per token and weight (A: layer weights used by a token, C: the output layer's).
    Attention costs four per head channel and attended token, on average n / 2 tokens (B).
    Source: appendix of arXiv:2104.04473, which attends to all n tokens and has an ungated MLP.

    Args:
        a: the model's architecture.
        tokens: n, prompt and response length together.
        outputs: m, positions with logits; 0 for a value model.
    """
    queries = a.num_attention_heads * a.head_dim
    keys = a.kv_heads * a.head_dim
    experts = a.moe_router_topk if a.num_experts else 1  # router excluded
    mlp = 3 * a.mlp_hidden_size * experts
    weights = a.hidden_size * (2 * (queries + keys) + mlp)
    layer = 2 * tokens * weights + 2 * a.num_attention_heads * a.head_dim * tokens**2
    return a.num_layers * layer + 2 * outputs * a.hidden_size * a.vocab_size


def balanced_partitions(costs: Sequence[float], num_partitions: int) -> list[list[int]]:
    """Divide items into partitions with equal counts and nearly equal total cost.

    Assigns the most expensive item first, each to the cheapest partition with room. Then swaps
    items between the most expensive partition and others while that makes it cheaper. Items with
    equal cost go to the partitions in their order, so neighbours, which one rank has made, mostly
    stay together: [9, 1, 5, 5, 1, 9] in 3 partitions gives [[0, 1], [2, 3], [4, 5]].

    Args:
        costs: [items], a multiple of num_partitions (asserted).
        num_partitions: how many.

    Returns:
        Each partition's indices, ascending; partitions are ordered by their first index.
    """
    size, rest = divmod(len(costs), num_partitions)
    assert rest == 0, f"{len(costs)} items do not make {num_partitions} equal partitions"
    filled = fill_cheapest(costs, num_partitions, size)
    items = np.array(filled, dtype=np.int64).reshape(num_partitions, size)
    exact_costs = np.asarray(costs, dtype=np.float64)
    _swap_items(items, exact_costs[items])
    partition_of_item = np.empty(len(exact_costs), dtype=np.int64)
    partition_of_item[items] = np.arange(num_partitions)[:, None]
    # Items of equal cost are interchangeable: deal their partitions to them in ascending order.
    by_cost_then_item = np.argsort(exact_costs, kind="stable")
    by_cost_then_partition = np.lexsort((partition_of_item, exact_costs))
    partition_of_item[by_cost_then_item] = partition_of_item[by_cost_then_partition]
    by_partition = np.argsort(partition_of_item, kind="stable").reshape(num_partitions, size)
    return sorted(by_partition.tolist())


def fill_cheapest(
    costs: Sequence[float], num_partitions: int, partition_size: int
) -> list[list[int]]:
    """Assign the most expensive item first, each to the cheapest partition with room.

    A partition has room for `partition_size` items. Returns each partition's indices in the order
    of assignment.
    """
    partitions: list[list[int]] = [[] for _ in range(num_partitions)]
    open_partitions = [(0.0, number) for number in range(num_partitions)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        total, number = heapq.heappop(open_partitions)
        partitions[number].append(item)
        if len(partitions[number]) < partition_size:
            heapq.heappush(open_partitions, (total + costs[item], number))
    return partitions


def _swap_items(items: np.ndarray, costs: np.ndarray) -> None:
    """Swap items between the most expensive partition and cheaper ones, one pair at a time.

    Each time, takes the cheapest other partition with a swap lowering the larger sum by more than
    0.1% of the mean partition, and the pair lowering it most; stops when no partition has one.
    Changes items and costs, both [partitions, size], in place.
    """
    totals = costs.sum(1)
    min_gain = 1e-3 * totals.mean()
    while True:
        high = int(totals.argmax())
        for low in np.argsort(totals, kind="stable"):
            gap = totals[high] - totals[low]
            # Moving d from one to the other lowers the larger of both by min(d, gap - d).
            moved = costs[high][:, None] - costs[low][None, :]
            gains = np.minimum(moved, gap - moved)
            i, j = np.unravel_index(int(gains.argmax()), gains.shape)
            if gains[i, j] > min_gain:
                break
        else:
            return
        for table in (items, costs):
            table[high, i], table[low, j] = table[low, j], table[high, i]
        totals[high] = costs[high].sum()
        totals[low] = costs[low].sum()
