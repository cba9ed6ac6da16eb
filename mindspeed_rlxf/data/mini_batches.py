"""Assign samples to optimizer steps, independently of the parallel layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RankSteps:
    """The share of one data-parallel rank.

    rows:  rows of the iteration's batch that the rank needs, ascending
    steps: for each optimizer step, positions within `rows`
    """

    rows: list[int]
    steps: list[list[int]]


def mini_batch_order(
    num_samples: int, epochs: int, shuffle: bool, seed: int, iteration: int, together: int = 1
) -> list[list[int]]:
    """Return the order of the samples in each epoch; shuffles derive from (seed, iteration, epoch).

    together: size of groups of consecutive samples that are shuffled as one
    """
    orders = []
    for epoch in range(epochs):
        order = np.arange(num_samples).reshape(-1, together)
        if shuffle:
            rng = np.random.default_rng((seed, iteration, epoch))
            order = order[rng.permutation(len(order))]
        orders.append(order.flatten().tolist())
    return orders


def rank_steps(orders: list[list[int]], mini_batch_size: int, num_ranks: int) -> list[RankSteps]:
    """Split each epoch into mini-batches, and each mini-batch into equal parts for the ranks.

    mini_batch_size must divide the number of samples, and num_ranks must divide mini_batch_size.
    """
    share = mini_batch_size // num_ranks
    whole = all(len(order) % mini_batch_size == 0 for order in orders)
    assert whole and share * num_ranks == mini_batch_size, "checked beforehand"
    ranks = []
    for rank in range(num_ranks):
        steps = [
            order[start + rank * share : start + (rank + 1) * share]
            for order in orders
            for start in range(0, len(order), mini_batch_size)
        ]
        rows = sorted({row for step in steps for row in step})
        position = {row: i for i, row in enumerate(rows)}
        ranks.append(RankSteps(rows, [[position[row] for row in step] for step in steps]))
    return ranks
