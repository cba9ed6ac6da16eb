"""The coordinates of a rank in the tensor, data and pipeline parallel groups of its role."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel sizes of a role, and the coordinates of its ranks.

    Megatron's default order tp-dp-pp: rank = tp_rank + tp * (dp_rank + dp * pp_rank).
    """

    world_size: int
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        assert self.world_size > 0 and self.world_size % (self.tp * self.pp) == 0, (
            f"{self.world_size} ranks do not hold whole replicas of TP {self.tp} x PP {self.pp}"
        )

    @property
    def dp(self) -> int:
        """Data-parallel size: number of replicas of the model."""
        return self.world_size // (self.tp * self.pp)

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def dp_rank(self, rank: int) -> int:
        return rank // self.tp % self.dp

    def pp_rank(self, rank: int) -> int:
        return rank // (self.tp * self.dp)

    def is_leader(self, rank: int) -> bool:
        """Return whether a rank is the one of its replica that returns results.

        It is TP rank 0 of the last pipeline stage.
        """
        return self.tp_rank(rank) == 0 and self.pp_rank(rank) == self.pp - 1

    def leaders(self) -> list[int]:
        """Return the leader rank of each replica, ordered by data-parallel rank."""
        return [rank for rank in range(self.world_size) if self.is_leader(rank)]


def count_per_node(processes: Sequence[int], first: int, count: int) -> list[int]:
    """Return how many of the ranks first, ..., first + count - 1 each node runs.

    Nodes without such a rank are left out, so the index is not that of the node.
    processes: ranks of each node; rank numbers fill one node after the other
    """
    ends = list(accumulate(processes))
    spans = zip((0, *ends), ends, strict=False)
    shares = [min(end, first + count) - max(start, first) for start, end in spans]
    return [share for share in shares if share > 0]
