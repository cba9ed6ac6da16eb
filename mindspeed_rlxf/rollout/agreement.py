"""How generating ranks agree on what the agents of a replica's leader have decided."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Agreement:
    """Process groups on the host, for runs with agents."""

    def __init__(self, replica_size: int = 1, shares_experts: bool = False) -> None:
        """Make the groups; a collective over all generating ranks.

        Args:
            replica_size: Ranks of a replica, which are consecutive.
            shares_experts: Whether replicas share experts, and so advance together.
        """
        self._replica: dist.ProcessGroup | None = None
        if replica_size > 1:
            self._replica, _ = dist.new_subgroups(replica_size, backend="gloo")
        self._all_ranks = dist.new_group(backend="gloo") if shares_experts else None

    def share(self, value: T) -> T:
        """Return the value of the replica's leader; a collective over the replica's ranks."""
        if self._replica is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, dist.get_global_rank(self._replica, 0), self._replica)
        return values[0]

    def is_any_left(self, num_unfinished: int) -> bool:
        """Whether a sample is unfinished here, or on a rank that shares experts; a collective."""
        if self._all_ranks is None:
            return num_unfinished > 0
        left = torch.tensor(num_unfinished)
        dist.all_reduce(left, group=self._all_ranks)
        return bool(left > 0)
