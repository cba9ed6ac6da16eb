"""A pool of Ray actors: one torch world, one process per device.

Rows are in Ray's object store. The driver passes Ray's references on as arguments of the calls that
read the rows, so Ray brings the rows to a rank before its call begins, and forgets them when the
driver has no reference any more. A call whose rows another rank failed to make fails with the error
of that rank.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from mindspeed_rlxf import device as device_facade
from mindspeed_rlxf.cluster.diagnosis import explain_timeout, oom_kills
from mindspeed_rlxf.cluster.errors import Origin, RuntimeTimeout, WorkerError
from mindspeed_rlxf.cluster.nodes import Place
from mindspeed_rlxf.cluster.protocol import Reply, Request
from mindspeed_rlxf.cluster.ray.wait import RankCall, gather
from mindspeed_rlxf.cluster.refs import number_handles
from mindspeed_rlxf.cluster.worker import ProcessSetup, WorkerProcess, log_of, worker_error
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.data.batch import Rows

if TYPE_CHECKING:
    from mindspeed_rlxf.cluster.ray.pools import RayPools

RESET_S = 3.0  # longest wait for the processes of an ended pool to reset


class RayWorker(WorkerProcess):
    """The Ray actor class of a worker process."""

    def __init__(self) -> None:
        self._rows: Sequence[Rows] = ()  # of the present call
        super().__init__(lambda handles: [self._rows[i] for i in handles])

    def report_place(self, entry: int) -> Place:
        """Return where this process runs. entry: index of its node in `processes_per_node`"""
        context = ray.get_runtime_context()
        ids = [i for found in context.get_accelerator_ids().values() for i in found]
        devices = tuple(int(i) for i in ids if i.isdigit())
        ip = ray.util.get_node_ip_address()
        node, kills = context.get_node_id(), oom_kills()
        return Place(socket.gethostname(), ip, entry, devices, os.getpid(), node, kills)

    def join(self, setup: ProcessSetup, ip: str, port: int, secrets: Mapping[str, str]) -> None:
        """Set `secrets` in os.environ and join the pool's world; raises WorkerError.

        See `WorkerProcess.start`.
        ip, port: of the pool's rendezvous store
        secrets:  environment variables that are not given to Ray as such: it would show them
        """
        os.environ.update(secrets)
        try:
            self.start(setup, ip, port, assigned_device(setup.device_kind))
        except Exception as error:
            raise worker_error(error, setup.pool, setup.rank, "start") from None

    @ray.method(num_returns=2)
    def run_request(self, message: bytes, *rows: Rows) -> tuple[Rows | None, Reply]:
        """Run a pickled request (see `RoleHost.run`), whose handles are indices into `rows`."""
        self._rows = rows
        try:
            return self.run(pickle.loads(message))
        finally:
            self._rows = ()


def assigned_device(kind: DeviceKind) -> str | None:
    """Return the id of the first device that Ray gave this process; None if it gave none.

    An id is the device's number on the host, or on CUDA a UUID. Logical devices have none.
    """
    resource = device_facade.ray_resource(kind)
    found = ray.get_runtime_context().get_accelerator_ids().get(resource, [])
    return str(found[0]) if found else None


@dataclass(frozen=True)
class RayWorkers:
    """The processes of a pool in the order of ranks, with their placement group."""

    processes_per_node: tuple[int, ...]
    placement_group: Any
    actors: tuple[Any, ...]
    places: tuple[Place, ...]

    def kill(self) -> None:
        """Kill the processes and release their devices."""
        for actor in self.actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self.placement_group)

    def reset(self) -> bool:
        """Make the processes leave their pool and wait; return False if one fails or is late.

        True = another pool can use them. A process is late after RESET_S seconds.
        """
        origins = [Origin("pool", rank, "", "reset") for rank in range(len(self.actors))]
        pairs = zip(origins, self.actors, strict=True)
        try:
            gather([RankCall(origin, actor.reset.remote()) for origin, actor in pairs], RESET_S)
        except (WorkerError, RuntimeTimeout):
            return False
        return True


class RayCall:
    """A method submitted to ranks of a pool; implements `Call`."""

    def __init__(self, handles: Sequence[RankCall], timeout_s: float) -> None:
        """Describe a call that has been submitted. handles: of its ranks, in order"""
        self.handles, self._timeout_s = handles, timeout_s

    def wait(self) -> list[Reply]:
        """Wait for the replies of all ranks and return them in order.

        The deadline counts from here. Raises WorkerError, or after the deadline RuntimeTimeout with
        what the late ranks do, as their logs show it.
        """
        try:
            replies: list[Reply] = gather(self.handles, self._timeout_s)
        except RuntimeTimeout as error:
            late = [call for call in self.handles if call.origin.rank in error.missing]
            lacks_rows: dict[Origin, bool] = {}
            calls = list(late)
            for call in calls:  # which grows by the calls that they wait for
                if call.origin not in lacks_rows:
                    inputs = call.late_inputs()
                    lacks_rows[call.origin] = bool(inputs)
                    calls += inputs
            raise explain_timeout(error, [call.origin for call in late], lacks_rows) from None
        for call in self.handles:
            call.inputs.clear()
        return replies


class RayPool:
    """Implements `protocol.Pool`."""

    def __init__(
        self,
        name: str,
        workers: RayWorkers,
        setups: Sequence[ProcessSetup],
        timeout_s: float,
        owner: RayPools,
    ) -> None:
        self.name, self.world_size, self.workers = name, len(workers.actors), workers
        self.timeout_s, self._setups, self.owner = timeout_s, setups, owner
        self._origins: dict[tuple[str, str], list[Origin]] = {}  # of all ranks, by role and method
        self._run = [actor.run_request.remote for actor in workers.actors]

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> RayCall:
        """Start one request per rank without waiting; rank `first_rank` gets the first request."""
        sent: dict[int, tuple[Any, list[RankCall]]] = {}  # ranks of a replica have the same args
        calls = []
        for rank, request in enumerate(requests, first_rank):
            if id(request.args) not in sent:
                sent[id(request.args)] = number_handles(request.args)
            args, inputs = sent[id(request.args)]
            # Ray's own pickler takes as long as the rest of a call. A factory may need it.
            pickler = ray.cloudpickle if request.factory else pickle
            message = pickler.dumps(dataclasses.replace(request, args=args))
            rows, reply = self._run[rank](message, *[call.rows for call in inputs])
            origin = self._all_origins(request.role.value, request.method)[rank]
            calls.append(RankCall(origin, reply, rows, inputs))
        return RayCall(calls, self.timeout_s)

    def _all_origins(self, role: str, phase: str) -> list[Origin]:
        """Return the Origin of `role` and `phase` on each rank, in order; later calls reuse it."""
        if (role, phase) not in self._origins:
            ranks = range(self.world_size)
            self._origins[role, phase] = [self.origin(rank, role, phase) for rank in ranks]
        return self._origins[role, phase]

    def origin(self, rank: int, role: str, phase: str) -> Origin:
        """Return where a call runs, for messages. phase: name of the method"""
        host, log = self.workers.places[rank].host, log_of(self._setups[rank]) or ""
        return Origin(role, rank, host, phase, log, self.name)

    def shutdown(self) -> None:
        """Kill the processes, or give them to the runtime if it keeps warm processes."""
        self.owner.release(self)
