"""Assign samples to optimizer steps, independently of the parallel layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_rlxf.data.balance import equal_parts


@dataclass(frozen=True)
class RankSteps:
    """The samples of one data-parallel rank.

    rows:  indices of the samples in the iteration's batch, ascending, each once
    steps: for each optimizer step, positions in `rows`
    """

    rows: list[int]
    steps: list[list[int]]


def mini_batch_order(
    num_samples: int, epochs: int, shuffle: bool, seed: int, iteration: int, group_size: int = 1
) -> list[list[int]]:
    """Return the order of the sample indices in each epoch: ascending, or shuffled.

    A shuffle derives from (seed, iteration, epoch) alone.
    group_size: number of consecutive samples that stay together, in order; must divide num_samples
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

    Returns for each rank its samples of all epochs, ascending and each once, and for each
    mini-batch the positions of the rank's samples in that list.
    orders:     [epochs][samples]. mini_batch_size must divide the number of samples, and be a
                multiple of num_ranks * group_size, or an AssertionError is raised.
    costs:      cost of each sample, for parts of nearly equal cost; None = consecutive parts
    group_size: number of consecutive samples of an order that stay on one rank
    """
    whole = all(len(order) % mini_batch_size == 0 for order in orders)
    assert whole and mini_batch_size % (num_ranks * group_size) == 0, "checked beforehand"
    shares = [
        _divide_samples(order[start : start + mini_batch_size], num_ranks, costs, group_size)
        for order in orders
        for start in range(0, len(order), mini_batch_size)
    ]
    ranks = []
    for rank in range(num_ranks):
        steps = [share[rank] for share in shares]
        rows = sorted({row for step in steps for row in step})
        position = {row: i for i, row in enumerate(rows)}
        ranks.append(RankSteps(rows, [[position[row] for row in step] for step in steps]))
    return ranks


def _divide_samples(
    samples: list[int], num_ranks: int, costs: Sequence[float] | None, group_size: int
) -> list[list[int]]:
    if costs is None:
        return np.reshape(samples, (num_ranks, -1)).tolist()
    groups = np.reshape(samples, (-1, group_size))
    of_groups = np.asarray(costs)[groups].sum(1)
    return [groups[part].flatten().tolist() for part in equal_parts(of_groups, num_ranks)]
