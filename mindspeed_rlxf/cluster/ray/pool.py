"""A pool of Ray actors: one torch world, one process per device."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ray

from mindspeed_rlxf import device as device_facade
from mindspeed_rlxf.cluster.diagnosis import explain_timeout, oom_kills
from mindspeed_rlxf.cluster.errors import Origin, RuntimeTimeout, WorkerError
from mindspeed_rlxf.cluster.nodes import Place
from mindspeed_rlxf.cluster.protocol import Reply, Request
from mindspeed_rlxf.cluster.ray.message import Message, make_messages, read_request
from mindspeed_rlxf.cluster.ray.rows import CallRows, RayHandle, WorkerRows, find_missing
from mindspeed_rlxf.cluster.ray.wait import gather
from mindspeed_rlxf.cluster.refs import find_refs
from mindspeed_rlxf.cluster.worker import ProcessSetup, WorkerProcess, log_of, worker_error
from mindspeed_rlxf.config.enums import DeviceKind

if TYPE_CHECKING:
    from mindspeed_rlxf.cluster.ray.pools import RayPools

RESET_S = 3.0  # longest wait for the processes of an ended pool to reset


_keys = itertools.count()  # of the rows of calls, unique in this driver


class RayWorker(WorkerProcess):
    """The Ray actor class of a worker process.

    `join` and `run_request` return errors and do not raise them, so that Ray does not report them
    too. One thread runs all methods but `give_rows`, which answers while a role computes.
    """

    def __init__(self) -> None:
        self._rows = WorkerRows()
        super().__init__(self._rows.fetch_rows)

    def report_place(self, entry: int) -> Place:
        """Return where this process runs; also store its actor name, by which others find its rows.

        entry: index of its node in `processes_per_node`
        """
        context = ray.get_runtime_context()
        ids = [i for found in context.get_accelerator_ids().values() for i in found]
        devices = tuple(int(i) for i in ids if i.isdigit())
        ip = ray.util.get_node_ip_address()
        node, kills = context.get_node_id(), oom_kills()
        name = self._rows.process = context.get_actor_name() or ""
        return Place(socket.gethostname(), ip, entry, devices, os.getpid(), node, kills, name)

    def join(
        self, setup: ProcessSetup, ip: str, port: int, secrets: Mapping[str, str]
    ) -> WorkerError | None:
        """Set `secrets` in os.environ and join the pool's world; return a WorkerError or None.

        See `WorkerProcess.start`. An error of joining is returned, not raised.
        ip, port: of the pool's rendezvous store
        secrets:  environment variables that are not given to Ray as such: it would show them
        """
        os.environ.update(secrets)
        self._rank, self._rows.timeout_s = setup.rank, setup.timeout_s
        try:
            self.start(setup, ip, port, assigned_device(setup.device_kind))
        except Exception as error:
            return worker_error(error, setup.pool, setup.rank, "start")
        return None

    def run_request(self, message: list[Any], built: Any = None) -> Reply | WorkerError:
        """Drop the rows that the message names, run its request and keep the resulting rows.

        Returns the reply, or the WorkerError of any failure, which is also kept in place of the
        rows, so that their readers get it.
        message, built: as `make_messages` returns them
        """
        asked = Message(*message)
        self._rows.kept.drop(asked.dropped)
        try:
            rows, reply = self.run(read_request(asked, built))
            self._rows.kept.put(asked.key, rows)
        except Exception as error:  # readers of the rows have to learn of any
            failure = error if isinstance(error, WorkerError) else self._as_own(error, asked)
            self._rows.kept.put(asked.key, failure)
            return failure
        return reply

    def _as_own(self, error: Exception, asked: Message) -> WorkerError:
        return worker_error(error, asked.role, self._rank, asked.method)

    @ray.method(concurrency_group="rows")
    def give_rows(self, keys: Sequence[int]) -> dict[int, Any]:
        """Return to another worker what is kept under these keys (see `WorkerRows.give`)."""
        return self._rows.give(keys)

    def reset(self) -> None:
        """Drop all rows and leave the pool; the process can join another one."""
        self._rows.clear()
        super().reset()


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
        tasks = [(a.reset.remote(), o) for a, o in zip(self.actors, origins, strict=True)]
        try:
            gather(tasks, RESET_S)
        except (WorkerError, RuntimeTimeout):
            return False
        return True


class RayCall:
    """A method submitted to ranks of a pool; implements `Call`."""

    def __init__(self, pool: RayPool, origins: Sequence[Origin], refs: list[Any], key: int) -> None:
        """Describe a call that has been submitted."""
        self._pool, self._origins, self._key = pool, origins, key
        self._rows = CallRows(pool, key, origins[0].rank, refs)

    @cached_property
    def handles(self) -> list[RayHandle]:
        return [RayHandle(self._rows, origin) for origin in self._origins]

    def wait(self) -> list[Reply]:
        """Wait for the replies of all ranks and return them in order; call it only once.

        The deadline counts from here. Raises WorkerError, or after the deadline RuntimeTimeout with
        what the late ranks do, as their logs show it.
        """
        tasks = list(zip(self._rows.replies, self._origins, strict=True))
        try:
            replies: list[Reply] = gather(tasks, self._pool.timeout_s)
        except RuntimeTimeout as error:
            requests = self._pool.under_way[self._key]
            both = [
                each
                for each in zip(self._origins, requests, strict=True)
                if each[0].rank in error.missing
            ]
            refs = [ref for _, request in both for ref in find_refs(request.args)]
            inputs = find_missing([piece.handle for ref in refs for piece in ref.pieces])
            producers = [handle.origin for handle in inputs]
            raise explain_timeout(error, [origin for origin, _ in both], producers) from None
        self._rows.replies.clear()
        del self._pool.under_way[self._key]
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
        # Requests by key, until their call has ended without error: they keep the rows they read.
        self.under_way: dict[int, Sequence[Request]] = {}
        self._dropped: list[list[int]] = [[] for _ in workers.actors]  # keys, for the next message
        self._origins: dict[tuple[str, str], list[Origin]] = {}  # of all ranks, by role and method
        self._run = [actor.run_request.remote for actor in workers.actors]

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> RayCall:
        """Start one request per rank without waiting; rank `first_rank` gets the first request.

        The keys of rows to drop go with the messages.
        """
        key, ranks = next(_keys), range(first_rank, first_rank + len(requests))
        self.under_way[key] = requests
        messages = make_messages(requests, key, [self._take_dropped(rank) for rank in ranks])
        refs = [self._run[rank](*message) for rank, message in zip(ranks, messages, strict=True)]
        pairs = zip(ranks, requests, strict=True)
        origins = [self._all_origins(r.role.value, r.method)[rank] for rank, r in pairs]
        return RayCall(self, origins, refs, key)

    def drop_rows(self, key: int, ranks: range) -> None:
        """Tell these ranks with their next message to drop the rows of a call."""
        for rank in ranks:
            self._dropped[rank].append(key)

    def _take_dropped(self, rank: int) -> list[int]:
        """Remove and return the keys of rows that a rank has to drop."""
        keys = self._dropped[rank]  # another thread, collecting garbage, may add to it
        taken = keys[:]
        del keys[: len(taken)]
        return taken

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
