"""A pool of Ray actors: one torch world, one process per device."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from mindspeed_rlxf import device as device_facade
from mindspeed_rlxf.cluster.deadlines import Deadlines
from mindspeed_rlxf.cluster.errors import Origin, RuntimeTimeout, WorkerError
from mindspeed_rlxf.cluster.host_agent import HostAgent
from mindspeed_rlxf.cluster.nodes import Place
from mindspeed_rlxf.cluster.protocol import Reply, Request
from mindspeed_rlxf.cluster.ray.wait import RayHandle, fetch_rows, find_missing, gather
from mindspeed_rlxf.cluster.refs import find_refs
from mindspeed_rlxf.cluster.witness import Watched, oom_kills
from mindspeed_rlxf.cluster.worker import ProcessSetup, WorkerProcess, log_of, worker_error
from mindspeed_rlxf.config.enums import DeviceKind

if TYPE_CHECKING:
    from mindspeed_rlxf.cluster.ray.pools import RayPools

RESET_S = 3.0  # for the last calls of an ended pool, whose processes are kept


class RayWorker(WorkerProcess):
    """The actor class. Errors are returned, not raised, so that Ray does not report them too."""

    def __init__(self) -> None:
        self._timeout_s = 0.0
        super().__init__(lambda handles: fetch_rows(handles, self._timeout_s))

    def place(self, entry: int) -> Place:
        """Return where this process runs: host, devices, pid, and entry of its pool."""
        context = ray.get_runtime_context()
        ids = [i for found in context.get_accelerator_ids().values() for i in found]
        devices = tuple(int(i) for i in ids if i.isdigit())
        ip = ray.util.get_node_ip_address()
        node, kills = context.get_node_id(), oom_kills()
        return Place(socket.gethostname(), ip, entry, devices, os.getpid(), node, kills)

    def join(
        self, setup: ProcessSetup, ip: str, port: int, secrets: Mapping[str, str]
    ) -> WorkerError | None:
        """Join the pool's world; return the WorkerError if that fails.

        secrets: environment variables hidden from Ray
        """
        os.environ.update(secrets)
        self._timeout_s = setup.collective_timeout_s
        try:
            self.start(setup, ip, port, assigned_device(setup.device_kind))
        except Exception as error:
            return worker_error(error, setup.pool, setup.rank, "start")
        return None

    @ray.method(num_returns=2)
    def run_request(self, request: Request) -> tuple[Any, Any]:
        """Run a request; return (rows, reply), or the WorkerError in place of both."""
        try:
            return self.run(request)
        except WorkerError as error:
            return error, error


def assigned_device(kind: DeviceKind) -> str | None:
    """Return the number of the one device that Ray gave this process; None for logical devices."""
    resource = device_facade.ray_resource(kind)
    found = ray.get_runtime_context().get_accelerator_ids().get(resource, [])
    return str(found[0]) if found else None


@dataclass(frozen=True)
class RayWorkers:
    """Started processes in the order of ranks, with their placement group."""

    processes_per_node: tuple[int, ...]
    placement_group: Any
    actors: tuple[Any, ...]
    places: tuple[Place, ...]

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self.placement_group)

    def reset(self) -> bool:
        """Prepare the processes for another pool; False when they cannot be used again."""
        origins = [Origin("pool", rank, "", "reset") for rank in range(len(self.actors))]
        tasks = [(a.reset.remote(), o) for a, o in zip(self.actors, origins, strict=True)]
        try:
            gather(tasks, RESET_S)
        except (WorkerError, RuntimeTimeout):
            return False
        return True


class RayCall:
    """A method under way. Its requests are kept until it ends, to explain a timeout."""

    def __init__(
        self,
        requests: Sequence[Request],
        refs: Sequence[Any],
        origins: Sequence[Origin],
        pool: RayPool,
    ) -> None:
        rows, replies = zip(*refs, strict=True)
        self.handles = [RayHandle(r, o) for r, o in zip(rows, origins, strict=True)]
        self._tasks = list(zip(replies, origins, strict=True))
        self._requests, self._pool = list(requests), pool

    def wait(self) -> list[Reply]:
        """Wait for the replies of all ranks.

        Raises WorkerError, or RuntimeTimeout with their states.
        """
        deadlines, started = self._pool.deadlines, time.monotonic()
        try:
            replies = gather(self._tasks, deadlines.seconds_for(self._requests))
        except RuntimeTimeout as error:
            inputs = self._late_inputs(error.missing)
            raise self._pool.owner.explain_timeout(self._pool, error, inputs) from None
        took_s = max(time.monotonic() - started, *(reply.seconds for reply in replies))
        deadlines.record(self._requests, took_s)
        self._requests.clear()
        return replies

    def _late_inputs(self, ranks: Sequence[int]) -> list[RayHandle]:
        """Return the rows that these ranks wait for."""
        waiting = [
            request
            for (_, origin), request in zip(self._tasks, self._requests, strict=True)
            if origin.rank in ranks
        ]
        refs = [ref for request in waiting for ref in find_refs(request.args)]
        return find_missing([piece.handle for ref in refs for piece in ref.pieces])


class RayPool:
    """Implements `protocol.Pool`."""

    def __init__(
        self,
        name: str,
        workers: RayWorkers,
        setups: Sequence[ProcessSetup],
        hosts: Sequence[HostAgent],
        deadlines: Deadlines,
        owner: RayPools,
    ) -> None:
        self.name, self.world_size, self.workers = name, len(workers.actors), workers
        self.hosts, self.deadlines = hosts, deadlines
        self._setups, self.owner = setups, owner

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> RayCall:
        """Start each request on its rank, from `first_rank` on, without waiting."""
        ranks = range(first_rank, first_rank + len(requests))
        pairs = list(zip(ranks, requests, strict=True))
        origins = [self.origin(rank, r.role.value, r.method) for rank, r in pairs]
        refs = [self.workers.actors[rank].run_request.remote(request) for rank, request in pairs]
        return RayCall(requests, refs, origins, self)

    def origin(self, rank: int, role: str, phase: str) -> Origin:
        host, log = self.workers.places[rank].host, log_of(self._setups[rank]) or ""
        return Origin(role, rank, host, phase, log, self.name)

    def list_workers(self) -> list[Watched]:
        """Return the workers of this pool, for diagnosis."""
        ranks = zip(self._setups, self.workers.places, self.hosts, strict=True)
        return [Watched(self.name, s.rank, at, log_of(s) or "", agent) for s, at, agent in ranks]

    def shutdown(self) -> None:
        """End the processes, or return them to a runtime that keeps them warm."""
        self.owner.release(self)
