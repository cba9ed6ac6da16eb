"""Compare four assignments of samples to data-parallel ranks by the work of the busiest rank.

The assignments are the samples' order, `balanced_partitions` of this package (`ours`), and two
reference algorithms. 32 samples per rank with the lengths of `balance_lengths.json`; work is that
of Qwen2.5-7B in FLOPs. Prints one JSON line: for each number of ranks the busiest rank's work over
the mean, the time of `balanced_partitions` in ms, and the largest number of micro-batches of at
most 16384 tokens on a rank (`micro_batches`): in order, and packed.

    python benchmarks/balance.py [--write-lengths SEED]
"""

import argparse
import heapq
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.data.mini_batches import balanced_partitions, sample_flops
from mindspeed_rlxf.engine.micro_batch import group_by_tokens, pack_by_tokens

LENGTHS = Path(__file__).with_name("balance_lengths.json")
RANKS, PER_RANK, LIMIT, TOKENS = (8, 16, 32), 32, 8192, 16384
QWEN25_7B = ArchitectureConfig(
    num_layers=28,
    hidden_size=3584,
    ffn_hidden_size=18944,
    num_attention_heads=28,
    num_query_groups=4,
    vocab_size=152064,
    max_position_embeddings=32768,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write-lengths", type=int, metavar="SEED", help="draw new lengths and store them first"
    )
    seed = parser.parse_args().write_lengths
    if seed is not None:
        LENGTHS.write_text(json.dumps(make_lengths(seed)) + "\n", encoding="utf-8")
    print(json.dumps({"benchmark": "balance", **{f"dp{dp}": measure(dp) for dp in RANKS}}))


def make_lengths(seed: int) -> dict[str, object]:
    """Draw log-normal lengths: prompts of median 245 tokens, responses of 665 up to the limit."""
    rng, count = np.random.default_rng(seed), max(RANKS) * PER_RANK
    prompts = rng.lognormal(5.5, 0.5, count).clip(16, 2048)
    responses = rng.lognormal(6.5, 1.0, count).clip(1, LIMIT)
    made = (
        f"default_rng({seed}): lognormal(5.5, 0.5) in 16..2048, lognormal(6.5, 1.0) in 1..{LIMIT}"
    )
    return {
        "made": made,
        "prompts": prompts.astype(int).tolist(),
        "responses": responses.astype(int).tolist(),
    }


def stored_lengths(count: int) -> tuple[list[int], list[int]]:
    """Return prompt and response lengths of the first `count` stored samples."""
    stored = json.loads(LENGTHS.read_text(encoding="utf-8"))
    return stored["prompts"][:count], stored["responses"][:count]


def stored_costs(count: int) -> list[int]:
    """Return the FLOPs of the first `count` stored samples."""
    both = zip(*stored_lengths(count), strict=True)
    return [sample_flops(QWEN25_7B, p + r, r) for p, r in both]


def measure(dp: int) -> dict[str, object]:
    """Compare the assignments for `dp` data-parallel ranks."""
    costs = stored_costs(dp * PER_RANK)
    mean = sum(costs) / dp
    in_order = [list(range(i * PER_RANK, (i + 1) * PER_RANK)) for i in range(dp)]
    started = time.perf_counter()
    partitions = balanced_partitions(costs, dp)
    seconds = time.perf_counter() - started
    tokens = [p + r for p, r in zip(*stored_lengths(dp * PER_RANK), strict=True)]
    return {
        "in_order": round(largest(costs, in_order) / mean, 4),
        "ours": round(largest(costs, partitions) / mean, 4),
        "greedy": round(largest_greedy(costs, dp) / mean, 4),
        "karmarkar_karp": round(largest_karmarkar_karp(costs, dp) / mean, 4),
        "ms": round(1000 * seconds, 2),
        "micro_batches": [
            max(len(group_by_tokens(partition, tokens, TOKENS)) for partition in in_order),
            max(len(pack_by_tokens(partition, tokens, TOKENS)) for partition in partitions),
        ],
    }


def largest(costs: Sequence[float], partitions: Sequence[Sequence[int]]) -> float:
    """Return the largest sum of costs of a partition. partitions: indices of `costs`"""
    return max(sum(costs[item] for item in partition) for partition in partitions)


def largest_greedy(costs: Sequence[float], partitions: int) -> float:
    """Return the largest sum of costs of a partition, by LPT (longest first) with equal counts."""
    size = len(costs) // partitions
    filled: list[list[float]] = [[] for _ in range(partitions)]
    for cost in sorted(costs, reverse=True):
        min((partition for partition in filled if len(partition) < size), key=sum).append(cost)
    return max(map(sum, filled))


def largest_karmarkar_karp(costs: Sequence[float], partitions: int) -> float:
    """Return the largest sum of costs of a partition, by balanced differencing.

    Michiels et al., ISAAC 2003: begin with tuples of one item per partition; join the two tuples
    with the largest differences within, large sums to small ones, until one is left.
    """
    ascending, number = sorted(costs), itertools.count()
    heap: list[tuple[float, int, list[float]]] = []

    def push(sums: list[float]) -> None:
        heapq.heappush(heap, (min(sums) - max(sums), next(number), sorted(sums)))

    for start in range(0, len(ascending), partitions):
        push(ascending[start : start + partitions])
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        push([a + b for a, b in zip(first, reversed(second), strict=True)])
    return heap[0][2][-1]


if __name__ == "__main__":
    main()
