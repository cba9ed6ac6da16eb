"""A pool of Ray actors: one torch world, one process per device."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from mindspeed_rlxf import device as device_facade
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.runtime.errors import RuntimeTimeout, WorkerError
from mindspeed_rlxf.runtime.places import Place
from mindspeed_rlxf.runtime.process import ProcessSetup, WorkerProcess
from mindspeed_rlxf.runtime.protocol import Reply, Request
from mindspeed_rlxf.runtime.ray_wait import Origin, RayHandle, fetch_rows, gather, not_ready
from mindspeed_rlxf.runtime.refs import find_refs
from mindspeed_rlxf.runtime.worker import worker_error

RESET_S = 3.0  # for the calls of an ended pool to finish, so that its processes can be kept


class RayWorker:
    """The actor class. Errors are returned, not raised: Ray then has nothing to say about them."""

    def __init__(self) -> None:
        self._timeout_s = 0.0
        self._process = WorkerProcess(lambda handles: fetch_rows(handles, self._timeout_s))

    def place(self, entry: int) -> Place:
        context = ray.get_runtime_context()
        ids = [i for found in context.get_accelerator_ids().values() for i in found]
        devices = tuple(int(i) for i in ids if i.isdigit())
        ip = ray.util.get_node_ip_address()
        return Place(socket.gethostname(), ip, entry, devices)

    def open_store(self, ip: str, world_size: int, timeout_s: float) -> int:
        return self._process.open_store(ip, world_size, timeout_s)

    def start(self, setup: ProcessSetup, ip: str, port: int) -> WorkerError | None:
        self._timeout_s = setup.timeout_s
        try:
            self._process.start(setup, ip, port, assigned_device(setup.device_kind))
        except Exception as error:
            return worker_error(error, setup.pool, setup.rank, "start")
        return None

    @ray.method(num_returns=2)
    def run(self, request: Request) -> tuple[Any, Any]:
        try:
            return self._process.run(request)
        except WorkerError as error:
            return error, error

    def reset(self) -> None:
        self._process.reset()


def assigned_device(kind: DeviceKind) -> str | None:
    """Number of the one device that Ray gave this process; None for logical devices."""
    resource = device_facade.ray_resource(kind)
    found = ray.get_runtime_context().get_accelerator_ids().get(resource, [])
    return str(found[0]) if found else None


@dataclass(frozen=True)
class RayWorkers:
    """Started processes with the reservation they live in, in the order of ranks."""

    processes_per_node: tuple[int, ...]
    placement_group: Any
    actors: tuple[Any, ...]
    places: tuple[Place, ...]

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self.placement_group)

    def reset(self) -> bool:
        """Make the processes ready for another pool; False when they cannot be used again."""
        origins = [Origin("pool", rank, "", "reset") for rank in range(len(self.actors))]
        tasks = [(a.reset.remote(), o) for a, o in zip(self.actors, origins, strict=True)]
        try:
            gather(tasks, RESET_S)
        except (WorkerError, RuntimeTimeout):
            return False
        return True


class RayCall:
    """A method under way; keeps its requests until it ends, to explain a timeout."""

    def __init__(
        self, requests: Sequence[Request], refs: Sequence[Any], origins: Sequence[Origin], s: float
    ) -> None:
        rows, replies = zip(*refs, strict=True)
        self.handles = [RayHandle(r, o) for r, o in zip(rows, origins, strict=True)]
        self._tasks = list(zip(replies, origins, strict=True))
        ranks = [origin.rank for origin in origins]
        self._requests, self._timeout_s = dict(zip(ranks, requests, strict=True)), s

    def wait(self) -> list[Reply]:
        replies = gather(self._tasks, self._timeout_s, self._what_they_wait_for)
        self._requests.clear()
        return replies

    def _what_they_wait_for(self, ranks: Sequence[int]) -> str:
        refs = [ref for rank in ranks for ref in find_refs(self._requests[rank].args)]
        late = not_ready([piece.handle for ref in refs for piece in ref.pieces])
        return "waiting for " + ", ".join(repr(handle) for handle in late) if late else ""


class RayPool:
    """Implements `protocol.Pool`."""

    def __init__(
        self,
        name: str,
        workers: RayWorkers,
        setups: Sequence[ProcessSetup],
        release: Callable[[RayPool], None],
    ) -> None:
        """release: takes the workers back when the pool ends."""
        self.name, self.world_size, self.workers = name, len(workers.actors), workers
        self.timeout_s = setups[0].timeout_s
        self._setups, self._release = setups, release

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> RayCall:
        ranks = range(first_rank, first_rank + len(requests))
        pairs = list(zip(ranks, requests, strict=True))
        origins = [self.origin(rank, r.role.value, r.method) for rank, r in pairs]
        refs = [self.workers.actors[rank].run.remote(request) for rank, request in pairs]
        return RayCall(requests, refs, origins, self.timeout_s)

    def origin(self, rank: int, role: str, phase: str) -> Origin:
        setup = self._setups[rank]
        log = f"{setup.log_dir}/{setup.pool}/rank_{rank:05d}.log" if setup.log_dir else ""
        return Origin(role, rank, self.workers.places[rank].host, phase, log)

    def shutdown(self) -> None:
        """End the processes, or hand them back to a runtime that keeps them warm."""
        self._release(self)
