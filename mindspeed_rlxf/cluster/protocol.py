"""The interface of a runtime, which `ray.runtime` and `local` implement.

A pool is one torch.distributed world: process i is rank i, one process per device. Several roles
may live in the processes of one pool; their methods then run one after the other, in the order of
submission. Methods on different pools run at the same time.

A pool may be split into parts, each a world of neighbouring ranks; `PoolPart` is one as a pool.
Methods on different parts run at the same time too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mindspeed_rlxf.cluster.host_agent import HostAgent
from mindspeed_rlxf.cluster.refs import Handle
from mindspeed_rlxf.config.enums import Role

BUILD = "build"


@dataclass(frozen=True)
class Peer:
    """An argument that the worker replaces by the object of another role of its process."""

    role: Role


@dataclass(frozen=True)
class Request:
    """One role method on one rank, which resolves every RowsRef and Peer in `args`."""

    role: Role
    method: str
    args: tuple[Any, ...]
    keeps_rows: bool  # of a leader, whose rows and report are used
    num_rows: int | None = None  # rows that the method has to return; None = any number
    factory: Callable[..., Any] | None = None  # builds the role instead of calling a method
    of_engine: bool = False  # a method of the role's engine, whose result is the report


@dataclass(frozen=True)
class Reply:
    """The reply of one rank to the driver."""

    report: Any  # None where the rank is no leader
    num_rows: int | None
    seconds: float  # in the method, without waiting for its inputs
    rank: int = 0  # in the pool
    started: float = 0.0  # start of the method, epoch seconds by the clock of the rank's host
    fetch_s: float = 0.0  # seconds before `started` that it waited for its inputs and fetched them
    memory: int = 0  # peak of the device in the method, bytes; on CPU resident memory after it


class Call(Protocol):
    """One method under way on all ranks of a pool."""

    @property
    def handles(self) -> Sequence[Handle]:
        """By rank: handles of the rows, which may not exist yet."""

    def wait(self) -> list[Reply]:
        """Wait for the replies, by rank. Raises WorkerError, or RuntimeTimeout at the deadline."""


class Pool(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    @property
    def hosts(self) -> Sequence[HostAgent]:
        """By rank: the agent of its host, the same object for the ranks of one host."""

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> Call:
        """Start one request per rank, in the order of ranks, without waiting.

        first_rank: of the first request; a part of the pool has fewer ranks than the pool
        """

    def shutdown(self) -> None:
        """End the roles and processes of this pool."""


class PoolPart:
    """Neighbouring ranks of a pool, counted from 0; implements `Pool`."""

    def __init__(self, pool: Pool, first_rank: int, world_size: int) -> None:
        assert 0 <= first_rank <= first_rank + world_size <= pool.world_size, (
            f"{pool.name} has {pool.world_size} ranks, not {first_rank} + {world_size}"
        )
        self.name, self.world_size = pool.name, world_size
        self.hosts = pool.hosts[first_rank : first_rank + world_size]
        self._pool, self._first = pool, first_rank

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> Call:
        return self._pool.submit(requests, self._first + first_rank)

    def shutdown(self) -> None:
        """Do nothing: the pool ends as a whole."""


class Runtime(Protocol):
    def create_pools(
        self,
        processes_per_node: Mapping[str, Sequence[int]],
        parts: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, Any]:
        """Create pools by name, at the same time. Each list has the processes of each node.

        parts: sizes of the parts of split pools
        """

    def shutdown(self) -> None:
        """End all pools and everything else that this runtime started."""
