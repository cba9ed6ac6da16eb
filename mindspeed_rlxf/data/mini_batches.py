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
    """The samples of one data-parallel rank."""

    rows: list[int]  # indices in the iteration's batch, ascending, each once
    steps: list[list[int]]  # for each optimizer step, positions in `rows`


def mini_batch_order(
    num_samples: int, epochs: int, shuffle: bool, seed: int, iteration: int, group_size: int = 1
) -> list[list[int]]:
    """Return the order of the sample indices in each epoch: ascending, or shuffled.

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
    """Split each epoch into mini-batches, and each mini-batch into equal parts for the ranks.

    Args:
        orders: [epochs][samples].
        mini_batch_size: divides the number of samples, and is a multiple of num_ranks * group_size
            (asserted).
        num_ranks: data-parallel size.
        costs: of each sample, for parts of nearly equal cost; None = consecutive parts.
        group_size: consecutive samples of an order that stay on one rank.

    Returns:
        For each rank its samples of all epochs, ascending and each once, and for each mini-batch
        the positions of the rank's samples in that list.
    """
    whole = all(len(order) % mini_batch_size == 0 for order in orders)
    assert whole and mini_batch_size % (num_ranks * group_size) == 0, "checked beforehand"
    shares: list[list[list[int]]] = []
    for order in orders:
        for start in range(0, len(order), mini_batch_size):
            samples = order[start : start + mini_batch_size]
            if costs is None:
                shares.append(np.reshape(samples, (num_ranks, -1)).tolist())
            else:
                groups = np.reshape(samples, (-1, group_size))
                parts = equal_parts(np.asarray(costs)[groups].sum(1), num_ranks)
                shares.append([groups[part].flatten().tolist() for part in parts])
    ranks = []
    for rank in range(num_ranks):
        steps = [share[rank] for share in shares]
        rows = sorted({row for step in steps for row in step})
        position = {row: i for i, row in enumerate(rows)}
        ranks.append(RankSteps(rows, [[position[row] for row in step] for step in steps]))
    return ranks


def sample_flops(a: ArchitectureConfig, tokens: int, outputs: int) -> int:
    """Return the floating-point operations of one forward pass over a sample: A n + B n^2 + C m.

    tokens:  n, length of the prompt and the response together
    outputs: m, positions for which logits are computed; 0 for a value model

    Counts two operations per token and weight (A: weights of all layers that a token uses, C: of
    the output layer). Attention costs four per channel of each head and attended token, on average
    n / 2 tokens (B).
    Source: appendix of arXiv:2104.04473, which attends to all n tokens and has an MLP without gate.
    """
    queries, keys = a.num_attention_heads * a.head_dim, a.kv_heads * a.head_dim
    experts = a.moe_router_topk if a.num_experts else 1  # the router is left out
    mlp = 3 * a.mlp_hidden_size * experts
    weights = a.hidden_size * (2 * (queries + keys) + mlp)
    layer = 2 * tokens * weights + 2 * a.num_attention_heads * a.head_dim * tokens**2
    return a.num_layers * layer + 2 * outputs * a.hidden_size * a.vocab_size


def equal_parts(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide items into parts of equal count with nearly equal sums of cost.

    Assigns the most expensive item first, each to the cheapest part that is not full. Then swaps
    items of the most expensive part with items of other parts while that makes it cheaper.

    Args:
        costs: [items], a multiple of num_parts of them (asserted).

    Returns:
        The indices of each part in ascending order, the parts ordered by their first index.
    """
    size, rest = divmod(len(costs), num_parts)
    assert rest == 0, f"{len(costs)} items do not make {num_parts} equal parts"
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    open_parts = [(0.0, number) for number in range(num_parts)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        total, number = heapq.heappop(open_parts)
        parts[number].append(item)
        if len(parts[number]) < size:
            heapq.heappush(open_parts, (total + costs[item], number))
    items = np.array(parts, dtype=np.int64).reshape(num_parts, size)
    _swap_items(items, np.asarray(costs, dtype=np.float64)[items])
    return sorted(sorted(part) for part in items.tolist())


def _swap_items(items: np.ndarray, costs: np.ndarray) -> None:
    """Swap items of the most expensive part with items of cheaper parts, one pair at a time.

    Each time, takes the cheapest other part for which a swap lowers the larger of the two sums by
    more than 0.1% of the mean sum of a part, and the pair that lowers it most. Stops when there is
    no such part. items, costs: [parts, size], changed in place
    """
    totals = costs.sum(1)
    least = 1e-3 * totals.mean()
    while True:
        high = int(totals.argmax())
        for low in np.argsort(totals, kind="stable"):
            gap = totals[high] - totals[low]
            # Moving d from one to the other lowers the larger of both by min(d, gap - d).
            moved = costs[high][:, None] - costs[low][None, :]
            gains = np.minimum(moved, gap - moved)
            i, j = np.unravel_index(int(gains.argmax()), gains.shape)
            if gains[i, j] > least:
                break
        else:
            return
        for table in (items, costs):
            table[high, i], table[low, j] = table[low, j], table[high, i]
        totals[high], totals[low] = costs[high].sum(), costs[low].sum()
