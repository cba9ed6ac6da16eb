"""The runtime without Ray: one process, or all ranks of torchrun, each running the same driver.

Every pool spans the whole torchrun world and all pools share its processes, so calls run one after
the other. Rows and reports are exchanged between the ranks at the end of each call.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster.diagnosis import stacks_when_late
from mindspeed_rlxf.cluster.errors import HostError, RuntimeTimeout, WorkerError
from mindspeed_rlxf.cluster.host_agent import (
    Function,
    HostAgent,
    HostCall,
    ThreadCall,
    collect_outcomes,
)
from mindspeed_rlxf.cluster.nodes import machine_id
from mindspeed_rlxf.cluster.protocol import COLLECTIVE_MARGIN_S, Reply, Request
from mindspeed_rlxf.cluster.worker import RoleHost
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Rows
from mindspeed_rlxf.device import worlds
from mindspeed_rlxf.engine import shared_groups

Outcome = Any  # the result of one rank, which all ranks get
Failure = WorkerError | HostError
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class LocalHandle:
    """A handle that contains the rows of one rank; equal only to itself."""

    rows: Rows | None
    origin: str

    def __repr__(self) -> str:
        return self.origin


class LocalCall:
    """A call that has ended; implements `Call`."""

    def __init__(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        """Keep the replies, and make a handle of the rows of each rank, also where it has none.

        outcomes: (rows, reply) of each rank
        """
        role, method = requests[0].role.value, requests[0].method
        self.handles = [
            LocalHandle(rows, f"rows of {role}.{method} from rank {rank}")
            for rank, (rows, _) in enumerate(outcomes)
        ]
        self._replies = [reply for _, reply in outcomes]

    def wait(self) -> list[Reply]:
        """Return the replies at once."""
        return self._replies


def claim_device(kind: DeviceKind, threads: int, timeout_s: float) -> None:
    """Set up the device with index LOCAL_RANK of torchrun (default 0) for this process.

    Call it before Megatron is imported. Raises UserError where the process does not see the device,
    or the installation lacks something.
    threads:   CPU threads of torch
    timeout_s: longest call; the timeout of collectives follows from it
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        device.setup(kind, threads, local_rank, deadline_s=timeout_s + COLLECTIVE_MARGIN_S)
    except ValueError as error:
        raise UserError(Problem("", str(error))) from error


def _encode_failure(error: Failure | None) -> str:
    """Return an error as JSON [class name, arguments] for the other ranks; None as `null`."""
    return json.dumps([type(error).__name__, error.__reduce__()[1]] if error else None)


def _decode_failure(text: str) -> Failure | None:
    """Return the error that `_encode_failure` wrote, or None."""
    found = json.loads(text)
    return (
        {kind.__name__: kind for kind in (WorkerError, HostError)}[found[0]](*found[1])
        if found
        else None
    )


class LocalWorld:
    """The ranks of torchrun, or this process alone, and how they exchange results."""

    def __init__(self, kind: DeviceKind, threads: int, timeout_s: float) -> None:
        """Set up the device, join the torch world of all ranks, make `hosts`: each rank's agent.

        Waits for the other ranks. RANK and WORLD_SIZE of torchrun are 0 and 1 by default. Raises
        UserError (see `claim_device`).
        timeout_s: longest wait for the other ranks in an exchange; collectives have a minute more
        """
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        claim_device(kind, threads, timeout_s)
        self.timeout_s, self._calls = timeout_s, itertools.count()
        self._store: Store = HashStore()
        if self.size > 1:
            self._store, _, _ = next(rendezvous("env://", self.rank, self.size))
        timeout = timedelta(seconds=timeout_s + COLLECTIVE_MARGIN_S)
        store = PrefixStore("world", self._store)
        worlds.join(device.backend(kind), store, self.rank, (self.size,), timeout)
        self._host_group = dist.new_group(backend="gloo", timeout=timeout)
        found = self.exchange((socket.gethostname(), machine_id()), "the names of hosts")
        agents = {host: LocalAgent(host[0], found.index(host), self) for host in found}
        self.hosts: list[HostAgent] = [agents[host] for host in found]  # by rank

    def exchange(self, outcome: Outcome | Failure, what: str) -> list[Outcome]:
        """Wait for the outcomes of all ranks and return them, in the order of ranks; a collective.

        A rank that passes a failure raises it without waiting; every other rank waits for all ranks
        and raises the failure of the lowest one. Raises RuntimeTimeout, which names the missing
        ranks, after `timeout_s`.
        what: what is waited for, for that message
        """
        number = next(self._calls)
        error = outcome if isinstance(outcome, Failure) else None
        self._store.set(self._key(number, self.rank), _encode_failure(error))
        if isinstance(outcome, Failure):
            raise outcome
        self._await_all(number, what)
        for rank in range(self.size):
            flag = self._store.get(self._key(number, rank))
            failure = _decode_failure(flag.decode())
            if failure is not None:
                raise failure
        if number > 0:  # every rank has read the flags of the call before
            self._store.delete_key(self._key(number - 1, self.rank))
        outcomes: list[Any] = [outcome]
        if self.size > 1:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, outcome, group=self._host_group)
        return outcomes

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0; return its result, or raise its error, on every rank.

        A collective, with the timeout of collectives. Result and error have to be picklable.
        """
        result: list[Any] = [None, None]
        if self.rank == 0:
            try:
                result[0] = make()
            except Exception as error:
                result[1] = error
        if self.size > 1:
            dist.broadcast_object_list(result, src=0, group=self._host_group)
        if result[1] is not None:
            raise result[1]
        return result[0]

    def close(self) -> None:
        """Drop all process groups and leave the torch world."""
        shared_groups.forget()
        worlds.leave()

    def _await_all(self, number: int, what: str) -> None:
        """Wait until all ranks have set their key of call `number` in the store.

        Raises RuntimeTimeout with the missing ranks after `timeout_s`. what: what is waited for,
        for the message
        """
        keys = [self._key(number, rank) for rank in range(self.size)]
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RuntimeTimeout(what, self.timeout_s, missing) from error

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"call/{number}/{rank}"


class LocalAgent(HostAgent):
    """Runs the functions of a host in threads of one of its ranks.

    All ranks must make the same calls in the same order; each of them gets every result.
    """

    def __init__(self, host: str, rank: int, world: LocalWorld) -> None:
        super().__init__(host)
        self._rank, self._world = rank, world

    def start(self, function: Function, *args: Any, timeout_s: float) -> LocalHostCall:
        """Wait for all ranks and the calls in `args`; then start a thread on the agent's rank only.

        All ranks must call it, and each gets a LocalHostCall. Raises RuntimeTimeout, and the
        HostError of a call in `args`.
        args:      every rank waits for the `LocalHostCall`s among them, which become their results
        timeout_s: deadline of the result, in seconds from the start of the thread
        """
        what = f"{function.__name__} on {self.host}"
        self._world.exchange(None, what)
        values = [arg.result() if isinstance(arg, LocalHostCall) else arg for arg in args]
        call = None
        if self._world.rank == self._rank:
            call = ThreadCall(self.host, function, values, timeout_s)
        return LocalHostCall(call, self._rank, what, self._world)


class LocalHostCall:
    """Implements `HostCall`. call: None on ranks that do not run the function"""

    def __init__(self, call: HostCall | None, rank: int, what: str, world: LocalWorld) -> None:
        self._call, self._rank, self._what, self._world = call, rank, what, world

    def result(self) -> Any:
        """Wait for the function and return its result on every rank; a collective.

        If the function failed, raises its HostError on every rank. If it is late, its own rank
        raises HostError, and each other rank that or RuntimeTimeout, whichever comes first.
        """
        (outcome,) = collect_outcomes([self._call]) if self._call else [None]
        return self._world.exchange(outcome, self._what)[self._rank]


class LocalPool:
    """Implements `protocol.Pool` in the processes of torchrun, or in this one."""

    def __init__(self, name: str, world: LocalWorld) -> None:
        self.name, self.world_size, self._world = name, world.size, world
        self.hosts = world.hosts
        self._host = RoleHost(world.rank, lambda handles: [handle.rows for handle in handles])

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> LocalCall:
        """Run this rank's request, wait for the other ranks, and return the ended call.

        Raises the WorkerError of a rank on every rank, and RuntimeTimeout on a rank that has waited
        for others for the `timeout_s` of the world. A rank whose own request takes that long writes
        its stacks to stderr once, and goes on. Asserts that there is a request for every rank.
        """
        assert first_rank == 0 and len(requests) == self.world_size, "a local pool has no parts"
        mine = requests[self._world.rank]
        outcome: Outcome | WorkerError
        try:
            with stacks_when_late(self._world.timeout_s):
                outcome = self._host.run(mine)
        except WorkerError as error:
            outcome = error
        return LocalCall(
            requests, self._world.exchange(outcome, f"{mine.role.value}.{mine.method}")
        )

    def shutdown(self) -> None:
        """Do nothing: the processes belong to torchrun."""


class LocalRuntime:
    """Implements `protocol.Runtime` in the processes of torchrun, or in this one."""

    def __init__(self, kind: DeviceKind, threads: int = 1, timeout_s: float = 1800.0) -> None:
        self.world = LocalWorld(kind, threads, timeout_s)

    @classmethod
    def from_config(cls, config: RunConfig, log_dir: Path | None) -> LocalRuntime:
        """Make the runtime of this process, and wait for the other ranks; see `LocalWorld`.

        log_dir: ignored, as output stays on the terminal
        """
        return cls(config.device.kind, config.device.cpu_threads, config.runtime.timeout_s)

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.world.rank == 0

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0; return its result, or raise its error, on every rank."""
        return self.world.from_first(make)

    def create_pools(
        self,
        processes_per_node: Mapping[str, Sequence[int]],
        parts: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, LocalPool]:
        """Return one pool for each name, all of the same processes.

        Raises UserError where the counts of a pool do not add up to the world size of torchrun.
        parts: asserted to be empty, because these pools cannot be split
        """
        assert not parts, "the rules of the configuration refuse split pools"
        size = self.world.size
        problems = [
            Problem(
                f"resource_pool.{name}",
                f"must add up to the {size} processes of runtime=local",
                list(counts),
                f"use {size}, or start {sum(counts)} with torchrun",
            )
            for name, counts in processes_per_node.items()
            if sum(counts) != size
        ]
        if problems:
            raise UserError(problems)
        return {name: LocalPool(name, self.world) for name in processes_per_node}

    def shutdown(self) -> None:
        """Leave the torch world; the processes go on."""
        self.world.close()
