"""Metrics of the ranks in an iteration: time, idle share, skew, memory.

All come from the replies of calls: one small record per rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from mindspeed_rlxf.cluster.group import Pending
from mindspeed_rlxf.cluster.protocol import Reply

GIB = 1024**3

Phases = Mapping[str, Sequence[Pending]]
"""Name of a phase, as in `timing/<phase>` -> the calls of that phase."""


def phase_metrics(phases: Phases) -> dict[str, float]:
    """Wait for the calls; return time, memory, skew and slowest rank of each phase.

    `timing/<phase>`: seconds, sum over its calls of the slowest rank's; `memory/<phase>`: GiB,
    maximum of all ranks.
    `skew/<phase>`: the slowest rank's time / the mean of all ranks - 1. Ranks that wait for each
    other in collectives take equally long, so it shows only work outside of collectives.
    `slowest_rank/<phase>`: its number. Both are of the pool of the phase's last call. A phase with
    a single rank, or no time, lacks them.
    """
    metrics = {}
    for name, calls in phases.items():
        replies = [reply for call in calls for reply in call.replies()]
        metrics[f"timing/{name}"] = sum(call.seconds for call in calls)
        metrics[f"memory/{name}"] = max(reply.memory for reply in replies) / GIB
        pool = calls[-1].pool
        busy = _seconds_by_rank([r for call in calls if call.pool == pool for r in call.replies()])
        mean = sum(busy.values()) / len(busy)
        if len(busy) > 1 and mean > 0:
            slowest = max(busy, key=lambda rank: busy[rank])
            metrics[f"skew/{name}"] = busy[slowest] / mean - 1.0
            metrics[f"slowest_rank/{name}"] = float(slowest)
    return metrics


def idle_metrics(phases: Phases, sizes: Mapping[str, int], seconds: float) -> dict[str, float]:
    """Wait for the calls; return `idle/<pool>`: share of the iteration in which ranks ran none.

    The mean of the pool's ranks, limited to 0 to 1; 1 for a pool without calls. Other calls than
    those of `phases`, such as the transfer of weights, count as idle.
    sizes:   pool -> number of ranks
    seconds: of the iteration
    """
    busy: dict[str, float] = dict.fromkeys(sizes, 0.0)
    for call in (call for calls in phases.values() for call in calls):
        busy[call.pool] += sum(reply.seconds for reply in call.replies())
    shares = {pool: used / (sizes[pool] * seconds) for pool, used in busy.items()}
    return {f"idle/{pool}": min(max(1.0 - share, 0.0), 1.0) for pool, share in shares.items()}


def _seconds_by_rank(replies: Sequence[Reply]) -> dict[int, float]:
    """Return rank -> sum of the seconds of its replies."""
    found: dict[int, float] = defaultdict(float)
    for reply in replies:
        found[reply.rank] += reply.seconds
    return found
