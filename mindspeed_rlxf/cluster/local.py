"""The runtime without Ray: one process, or all torchrun ranks, each running the same driver.

Every pool spans the whole torchrun world and all pools share its processes, so calls run one after
another. The ranks exchange rows and reports at the end of each call.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster.errors import RuntimeTimeout, WorkerError, stacks_when_late
from mindspeed_rlxf.cluster.interface import COLLECTIVE_MARGIN_S, Reply, Request
from mindspeed_rlxf.cluster.worker import RoleHost, layout_environment, offload_environment
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Rows
from mindspeed_rlxf.device import worlds

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class LocalHandle:
    """Holds one rank's rows; equal only to itself."""

    rows: Rows | None
    origin: str

    def __repr__(self) -> str:
        return self.origin


class LocalCall:
    """An ended call; implements `Call`."""

    def __init__(self, requests: Sequence[Request], outcomes: Sequence[Any]) -> None:
        call = f"{requests[0].role.value}.{requests[0].method}"
        self.handles = []
        self._replies = []
        for rank, (rows, reply) in enumerate(outcomes):
            self.handles.append(LocalHandle(rows, f"rows of {call} from rank {rank}"))
            self._replies.append(reply)

    def wait(self) -> list[Reply]:
        """Return the replies at once."""
        return self._replies


def claim_device(kind: DeviceKind, threads: int, timeout_s: float, megatron: bool = True) -> None:
    """Set up the device with torchrun's index LOCAL_RANK (default 0), before Megatron is imported.

    Collectives may take COLLECTIVE_MARGIN_S longer than `timeout_s`. Raises UserError if the device
    cannot be used. `megatron`: see `device.setup`.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        deadline_s = timeout_s + COLLECTIVE_MARGIN_S
        device.setup(kind, threads, local_rank, deadline_s=deadline_s, megatron=megatron)
    except ValueError as error:
        raise UserError(Problem("", str(error))) from error


class LocalPool:
    """Implements `Pool` in the torchrun processes, or in this one."""

    def __init__(self, name: str, runtime: LocalRuntime) -> None:
        self.name = name
        self.world_size = runtime.size
        self._runtime = runtime
        self._host = RoleHost(runtime.rank, lambda handles: [handle.rows for handle in handles])

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> LocalCall:
        """Run this rank's request, wait for the other ranks, and return the ended call.

        Every rank raises another rank's WorkerError, and RuntimeTimeout if it waits too long.
        """
        assert first_rank == 0 and len(requests) == self.world_size, "a local pool has no sub-pools"
        request = requests[self._runtime.rank]
        outcome: Any
        try:
            with stacks_when_late(self._runtime.timeout_s):
                outcome = self._host.run(request)
        except WorkerError as error:
            outcome = error
        call = f"{request.role.value}.{request.method}"
        return LocalCall(requests, self._runtime.exchange(outcome, call))

    def shutdown(self) -> None:
        """Do nothing: the processes belong to torchrun."""


class LocalRuntime:
    """Implements `Runtime` in the torchrun processes, or in this one."""

    def __init__(
        self,
        kind: DeviceKind,
        threads: int = 1,
        timeout_s: float = 1800.0,
        megatron: bool = True,
    ) -> None:
        """Set up the device and join the torch world; waits for the other ranks.

        `timeout_s` limits waits for other ranks in an exchange; collectives get a minute more.
        `megatron`: see `device.setup`.
        """
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        claim_device(kind, threads, timeout_s, megatron)
        self.timeout_s = timeout_s
        self._calls = itertools.count()
        self._store: Store = HashStore()
        if self.size > 1:
            self._store, _, _ = next(rendezvous("env://", self.rank, self.size))
        timeout = timedelta(seconds=timeout_s + COLLECTIVE_MARGIN_S)
        store = PrefixStore("world", self._store)
        worlds.join(device.facts(kind).backend, store, self.rank, (self.size,), timeout)
        self._host_group = dist.new_group(backend="gloo", timeout=timeout)

    @classmethod
    def from_config(cls, config: RunConfig) -> LocalRuntime:
        """Create this process's runtime, and wait for the other ranks."""
        # Read when the device starts.
        os.environ.update(offload_environment(config) | layout_environment(config))
        megatron = all(config.backend_of(pool) == "megatron" for pool in config.resource_pool)
        settings = config.device.kind, config.device.cpu_threads, config.runtime.timeout_s
        return cls(*settings, megatron)

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run files."""
        return self.rank == 0

    def exchange(self, outcome: Any, what: str) -> list[Any]:
        """Collect every rank's outcome in rank order; a collective.

        A rank passing a failure raises it without waiting. Every other rank waits for all ranks,
        then raises the failure from the lowest one, or after `timeout_s` RuntimeTimeout with the
        missing ranks.
        """
        number = next(self._calls)
        keys = [f"call/{number}/{rank}" for rank in range(self.size)]
        error = outcome if isinstance(outcome, WorkerError) else None
        self._store.set(keys[self.rank], json.dumps(error.__reduce__()[1] if error else None))
        if error:
            raise error
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError as late:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RuntimeTimeout(what, self.timeout_s, missing) from late
        for key in keys:
            failure = json.loads(self._store.get(key))
            if failure is not None:
                raise WorkerError(*failure)
        if number > 0:  # every rank has read the flags of the call before
            self._store.delete_key(f"call/{number - 1}/{self.rank}")
        outcomes: list[Any] = [outcome]
        if self.size > 1:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, outcome, group=self._host_group)
        return outcomes

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0; return its result, or raise its error, on every rank."""
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

    def create_pools(
        self,
        processes_per_node: Mapping[str, Sequence[int]],
        subpool_sizes: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, LocalPool]:
        """Return one pool per name, all with the same processes."""
        assert not subpool_sizes, "the rules of the configuration refuse disaggregated pools"
        size = self.size
        problems = []
        for name, counts in processes_per_node.items():
            if sum(counts) != size:
                rule = f"must add up to the {size} processes of runtime=local"
                remedy = f"use {size}, or start {sum(counts)} with torchrun"
                problems.append(Problem(f"resource_pool.{name}", rule, list(counts), remedy))
        if problems:
            raise UserError(problems)
        return {name: LocalPool(name, self) for name in processes_per_node}

    def shutdown(self) -> None:
        """Leave the torch world; the processes go on."""
        worlds.leave()
