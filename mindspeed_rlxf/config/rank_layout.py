"""A rank's coordinates in its role's tensor, context, data and pipeline parallel groups."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelLayout:
    """A role's parallel sizes, and its ranks' coordinates.

    Megatron's default order tp-cp-dp-pp: rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp *
    pp_rank)).
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        assert self.world_size > 0 and self.world_size % (self.tp * self.cp * self.pp) == 0, (
            f"{self.world_size} ranks do not hold whole replicas of TP {self.tp} x CP {self.cp} x "
            f"PP {self.pp}"
        )

    @property
    def dp(self) -> int:
        """Data-parallel size: the number of model replicas."""
        return self.world_size // (self.tp * self.cp * self.pp)

    def tp_rank(self, rank: int) -> int:
        """Return a rank's tensor-parallel coordinate."""
        return rank % self.tp

    def cp_rank(self, rank: int) -> int:
        """Return a rank's context-parallel coordinate: which tokens of a micro-batch it has."""
        return rank // self.tp % self.cp

    def dp_rank(self, rank: int) -> int:
        """Return a rank's data-parallel coordinate."""
        return rank // (self.tp * self.cp) % self.dp

    def pp_rank(self, rank: int) -> int:
        """Return a rank's pipeline stage."""
        return rank // (self.tp * self.cp * self.dp)

    def is_leader(self, rank: int) -> bool:
        """Whether a rank returns its replica's results: TP and CP rank 0 in the last stage."""
        is_first = self.tp_rank(rank) == 0 and self.cp_rank(rank) == 0
        return is_first and self.pp_rank(rank) == self.pp - 1

    def leaders(self) -> list[int]:
        """Return each replica's leader rank, in data-parallel order."""
        return [rank for rank in range(self.world_size) if self.is_leader(rank)]


def count_per_node(processes: Sequence[int], first: int, count: int) -> list[int]:
    """Count the ranks first, ..., first + count - 1 on each node, leaving out nodes without any.

    Args:
        processes: Ranks per node; rank numbers fill one node after the other.
        first: First rank.
        count: Number of ranks.
    """
    counts = []
    start = 0  # first rank of the node
    for num_ranks in processes:
        end = start + num_ranks
        overlap = min(end, first + count) - max(start, first)
        if overlap > 0:
            counts.append(overlap)
        start = end
    return counts
