"""The interface of a runtime, which `ray.runtime` and `local` implement.

A pool is one torch.distributed world: process i is rank i, one process per device. Several roles
may live in the processes of one pool; their methods then run one after the other, in the order of
submission. On Ray methods on different pools run at the same time; the pools of `local` are the
same processes.

A pool may be split into parts. The neighbouring ranks of a part form a world of their own, which
`PoolPart` presents as a pool. Methods on different parts run at the same time too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mindspeed_rlxf.cluster.refs import Handle
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.engine.work import NONE, Work

BUILD = "build"
COLLECTIVE_MARGIN_S = 60.0  # the driver's deadline passes first, and its message names the ranks


@dataclass(frozen=True)
class Peer:
    """An argument that the worker replaces by the object of another role of its process."""

    role: Role


class Request(NamedTuple):
    """A call of one role method on one rank.

    The rank replaces each RowsRef in `args` by its rows, and each argument that is a Peer by the
    role object.
    """

    role: Role
    method: str
    args: tuple[Any, ...]
    keeps_rows: bool  # True on leaders, whose rows are kept and whose report is sent
    num_rows: int | None = None  # rows that the method has to return; None = any number
    factory: Callable[..., Any] | None = None  # builds the role instead of calling a method
    of_engine: bool = False  # a method of the role's engine, whose result is the report


class Reply(NamedTuple):
    """The reply of one rank to the driver."""

    report: Any  # None where the rank is no leader
    num_rows: int | None  # rows that the rank keeps; None = the method returned no rows
    seconds: float  # in the method, without waiting for its inputs
    rank: int = 0  # in the pool
    started: float = 0.0  # start of the method, epoch seconds by the clock of the rank's host
    memory: int = 0  # peak of the device in the method, bytes; on CPU resident memory after it
    work: Work = NONE  # of the training engines; all of a replica by its leader


class Call(Protocol):
    """A method submitted to all ranks of a pool."""

    @property
    def handles(self) -> Sequence[Handle]:
        """Handles of each rank's rows, in the order of ranks; the rows may not exist yet."""

    def wait(self) -> list[Reply]:
        """Wait for all ranks; return their replies in the order of ranks.

        Raises WorkerError, or RuntimeTimeout at the deadline; without Ray `submit` has raised them.
        """


class Pool(Protocol):
    name: str
    world_size: int

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> Call:
        """Start one request per rank, in the order of ranks, without waiting.

        Without Ray the requests run before `submit` returns, and it raises their errors.
        first_rank: the rank that gets the first request, so that a part can be called alone
        """

    def shutdown(self) -> None:
        """End the pool, with its processes unless another pool can use them or others own them."""


class PoolPart:
    """A part of a pool as a pool of its own; implements `Pool`."""

    def __init__(self, pool: Pool, first_rank: int, world_size: int) -> None:
        """Take consecutive ranks of `pool`, under its name; asserts that the pool has them."""
        assert 0 <= first_rank <= first_rank + world_size <= pool.world_size, (
            f"{pool.name} has {pool.world_size} ranks, not {first_rank} + {world_size}"
        )
        self.name, self.world_size = pool.name, world_size
        self._pool, self._first = pool, first_rank

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> Call:
        return self._pool.submit(requests, self._first + first_rank)

    def shutdown(self) -> None:
        """Do nothing: the processes end with the whole pool."""


class Runtime(Protocol):
    def create_pools(
        self,
        processes_per_node: Mapping[str, Sequence[int]],
        parts: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, Any]:
        """Create all pools at the same time and wait; return them by name.

        Args:
            processes_per_node: Number of processes on each node, by pool.
            parts: Sizes of the parts of disaggregated pools, by pool.
        """

    def shutdown(self) -> None:
        """End all pools and everything else that this runtime started."""
