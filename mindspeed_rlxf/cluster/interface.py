"""The runtime interface, implemented by `ray.runtime` and `local`.

A pool is one torch.distributed world: process i is rank i, one process per device. Several roles
may share pool processes; their methods then run one after another, in submission order. Methods on
different Ray pools run concurrently; the pools of `local` are the same processes.

A pool may be split into sub-pools: neighbouring ranks with a world of their own, which `SubPool`
presents as a pool. Methods on different sub-pools run concurrently too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mindspeed_rlxf.cluster.refs import Handle
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.engine.flop_counter import NONE, Work

BUILD = "build"
COLLECTIVE_MARGIN_S = 60.0  # the driver's deadline passes first, and its message names the ranks


@dataclass(frozen=True)
class ColocatedRole:
    """An argument that the worker replaces by another role object in its process."""

    role: Role


class Request(NamedTuple):
    """A role method call on one rank.

    The rank replaces each RowsRef in `args` by its rows, and each ColocatedRole by the role object.
    """

    role: Role
    method: str
    args: tuple[Any, ...]
    is_leader: bool  # True on leaders, whose rows are kept and whose report is sent
    num_rows: int | None = None  # rows that the method has to return; None = any number
    factory: Callable[..., Any] | None = None  # builds the role instead of calling a method
    of_engine: bool = False  # a method of the role's engine, whose result is the report


class Reply(NamedTuple):
    """One rank's reply to the driver."""

    report: Any  # None where the rank is no leader
    num_rows: int | None  # rows that the rank keeps; None = the method returned no rows
    seconds: float  # in the method, without waiting for its inputs
    rank: int = 0  # in the pool
    started: float = 0.0  # start of the method, epoch seconds by the clock of the rank's host
    memory: int = 0  # peak of the device in the method, bytes; on CPU resident memory after it
    work: Work = NONE  # of the training engines; all of a replica by its leader


class Call(Protocol):
    """A method submitted to all pool ranks."""

    @property
    def handles(self) -> Sequence[Handle]:
        """Row handles in rank order; the rows may not exist yet."""

    def wait(self) -> list[Reply]:
        """Wait for all ranks; return their replies in rank order.

        Raises WorkerError, or RuntimeTimeout at the deadline; without Ray, `submit` has raised
        them.
        """


class Pool(Protocol):
    """Worker processes that run role methods, one per rank."""

    name: str
    world_size: int

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> Call:
        """Start one request per rank, in rank order, without waiting.

        Without Ray the requests run before `submit` returns, and it raises their errors.
        `first_rank` gets the first request, so that a sub-pool can be called alone.
        """

    def shutdown(self) -> None:
        """End the pool, and its processes unless another pool uses them or others own them."""


class SubPool:
    """Neighbouring ranks of a pool as a pool of their own; implements `Pool`."""

    def __init__(self, pool: Pool, first_rank: int, world_size: int) -> None:
        assert 0 <= first_rank <= first_rank + world_size <= pool.world_size, (
            f"{pool.name} has {pool.world_size} ranks, not {first_rank} + {world_size}"
        )
        self.name = pool.name
        self.world_size = world_size
        self._pool = pool
        self._first_rank = first_rank

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> Call:
        """Start one request per rank without waiting."""
        return self._pool.submit(requests, self._first_rank + first_rank)

    def shutdown(self) -> None:
        """Do nothing: the processes end with the whole pool."""


class Runtime(Protocol):
    """Creates pools, and ends them."""

    def create_pools(
        self,
        processes_per_node: Mapping[str, Sequence[int]],
        subpool_sizes: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, Any]:
        """Create all pools at the same time and wait; return them by name.

        Args:
            processes_per_node: Process count on each node, by pool.
            subpool_sizes: Ranks of each sub-pool of a disaggregated pool, by pool.
        """

    def shutdown(self) -> None:
        """End all pools and everything else this runtime started."""
