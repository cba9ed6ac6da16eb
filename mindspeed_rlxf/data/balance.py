"""Divide samples among data-parallel ranks: equal counts, nearly equal cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from mindspeed_rlxf.config.architecture import ArchitectureConfig


def layer_matrices(a: ArchitectureConfig) -> tuple[int, int]:
    """Count the numbers of a layer's matrices that a token meets: of attention, and of the MLP."""
    queries, keys = a.num_attention_heads * a.head_dim, a.kv_heads * a.head_dim
    experts = a.moe_router_topk if a.num_experts else 1
    return 2 * a.hidden_size * (queries + keys), 3 * a.hidden_size * a.mlp_hidden_size * experts


def sample_flops(a: ArchitectureConfig, tokens: int, outputs: int) -> int:
    """Floating-point operations of one forward pass over a sample: a n + b n^2 + c m.

    tokens:  n, of the prompt and the response
    outputs: m, positions for which logits are computed; 0 for a value model

    Two operations per token and weight of a matrix (a: of the layers, c: of the output layer);
    two per channel of a head for scores and two for values of n / 2 earlier tokens on average.
    So counts the appendix of arXiv:2104.04473, with all tokens attended to and an MLP without gate.
    A backward pass takes twice as much (same source), so that samples compare as they do here.
    """
    layer = 2 * tokens * sum(layer_matrices(a)) + 2 * a.num_attention_heads * a.head_dim * tokens**2
    return a.num_layers * layer + 2 * outputs * a.hidden_size * a.vocab_size


def equal_parts(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide items into parts of equal count with nearly equal sums of cost.

    num_parts must divide the number of items. Returns the items of each part in ascending order,
    parts in the order of their first items, so that one item per part leaves them in order.

    The most expensive items first, each to the cheapest part that has room; then the most expensive
    part exchanges items with others as long as that makes it cheaper.
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
    _exchange(items, np.asarray(costs, dtype=np.float64)[items])
    return sorted(sorted(part) for part in items.tolist())


def _exchange(items: np.ndarray, costs: np.ndarray) -> None:
    """Exchange pairs between the most expensive part and the cheapest one that gains by it.

    items, costs: [parts, size], changed in place
    """
    totals = costs.sum(1)
    least = 1e-3 * totals.mean()  # a smaller gain is not worth an exchange
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
