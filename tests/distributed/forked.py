"""A Runtime whose ranks are forks of a process that has imported everything.

It takes the place of Ray's where a test is about roles or runs: a pool starts in a moment, without
a cluster. Calls and rows go through the driver, by a pipe for each rank.
"""

import contextlib
import os
import pickle
import queue
import signal
import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster.errors import DIED, Origin, RuntimeTimeout, WorkerError
from mindspeed_rlxf.cluster.interface import COLLECTIVE_MARGIN_S, Request
from mindspeed_rlxf.cluster.refs import number_handles
from mindspeed_rlxf.cluster.worker import RoleHost, worker_error
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import worlds
from tests.forks import Forks, receive

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 300.0
FIRST_CAUSE_S = 5.0  # wait for a failure that explains lost connections


def serve_calls(
    connection: Connection,
    pool: str,
    rank: int,
    subpool_sizes: Sequence[int],
    port: int,
    megatron: bool,
) -> None:
    """Join the pool's world as one rank, and run requests until the driver closes the pipe."""
    connection.send(os.getpid())
    timeout = timedelta(seconds=TIMEOUT_S + COLLECTIVE_MARGIN_S)
    try:
        device.setup(DeviceKind.CPU, megatron=megatron)
        store = dist.TCPStore(LOOPBACK, port, sum(subpool_sizes), timeout=timeout)
        worlds.join("gloo", store, rank, tuple(subpool_sizes), timeout)
        connection.send(None)
    except Exception as error:
        connection.send(worker_error(error, pool, rank, "start"))
    inputs: list[Any] = []
    host = RoleHost(rank, lambda handles: [inputs[i] for i in handles])
    while True:
        try:
            request, num_inputs = pickle.loads(connection.recv_bytes())
            inputs = [pickle.loads(connection.recv_bytes()) for _ in range(num_inputs)]
            outcome: Any = host.run(request)
        except WorkerError as error:
            outcome = None, error
        inputs = []
        connection.send_bytes(pickle.dumps(outcome[0]))
        connection.send_bytes(pickle.dumps(outcome[1]))


class RankCall:
    """One rank's call; also the driver's handle for the rows it returns."""

    def __init__(self, origin: Origin, message: bytes, inputs: Sequence["RankCall"]) -> None:
        self.origin, self.message, self.inputs = origin, message, inputs
        self.ended = threading.Event()
        self.rows = b""  # pickled; the driver hands them on
        self.reply: Any = None  # or the WorkerError

    @property
    def error(self) -> WorkerError | None:
        return self.reply if isinstance(self.reply, WorkerError) else None

    def __repr__(self) -> str:
        return f"rows of {self.origin.call} from rank {self.origin.rank}"


class Rank:
    """A forked process, and the thread that sends it one call after another."""

    def __init__(self, connection: Connection, changed: threading.Condition) -> None:
        self.connection = connection
        self.pid: int = receive(connection)
        self.calls: queue.SimpleQueue[RankCall | None] = queue.SimpleQueue()
        self.changed = changed

    def begin(self) -> None:
        """Send calls from now on."""
        threading.Thread(target=self._send_calls, daemon=True).start()

    def _send_calls(self) -> None:
        for call in iter(self.calls.get, None):
            for each in call.inputs:
                each.ended.wait()
            lost = next((each.error for each in call.inputs if each.error), None)
            call.reply = lost or self._run(call)
            call.inputs = []
            call.ended.set()
            with self.changed:
                self.changed.notify_all()

    def _run(self, call: RankCall) -> Any:
        try:
            self.connection.send_bytes(call.message)
            for each in call.inputs:
                self.connection.send_bytes(each.rows)
            call.rows = self.connection.recv_bytes()
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return call.origin.make_error(DIED)

    def end(self) -> None:
        self.calls.put(None)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class ForkedCall:
    """A method submitted to ranks; implements `Call`."""

    def __init__(self, handles: Sequence[RankCall], changed: threading.Condition) -> None:
        self.handles, self._changed = handles, changed

    def wait(self) -> list[Any]:
        """Return the replies in rank order; raise the failure that caused the others."""
        with self._changed:
            if not self._changed.wait_for(self._is_decided, TIMEOUT_S):
                late = [call.origin for call in self.handles if not call.ended.is_set()]
                raise RuntimeTimeout(late[0].call, TIMEOUT_S, [origin.rank for origin in late])
            if self._errors():
                self._changed.wait_for(self._is_explained, FIRST_CAUSE_S)
        errors = self._errors()
        if errors:
            raise min(errors, key=lambda error: (error.is_aftermath, error.rank))
        return [call.reply for call in self.handles]

    def _errors(self) -> list[WorkerError]:
        return [call.error for call in self.handles if call.error]

    def _has_ended(self) -> bool:
        return all(call.ended.is_set() for call in self.handles)

    def _is_decided(self) -> bool:
        return bool(self._errors()) or self._has_ended()

    def _is_explained(self) -> bool:
        return not all(error.is_aftermath for error in self._errors()) or self._has_ended()


class ForkedPool:
    """Implements `Pool`."""

    def __init__(self, name: str, ranks: Sequence[Rank], store: dist.Store) -> None:
        self.name, self.world_size = name, len(ranks)
        self._ranks, self._store = ranks, store

    def wait_until_joined(self) -> None:
        """Raise the WorkerError of a rank that could not join."""
        for rank in self._ranks:
            problem = receive(rank.connection)
            if problem:
                raise problem
            rank.begin()

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> ForkedCall:
        """Start one request per rank without waiting; rank `first_rank` gets the first request."""
        calls = []
        for rank, request in enumerate(requests, first_rank):
            args, inputs = number_handles(request.args)
            message = pickle.dumps((request._replace(args=args), len(inputs)))
            origin = Origin(request.role.value, rank, socket.gethostname(), request.method)
            calls.append(RankCall(origin, message, inputs))
            self._ranks[rank].calls.put(calls[-1])
        return ForkedCall(calls, self._ranks[0].changed)

    def shutdown(self) -> None:
        for rank in self._ranks:
            rank.end()


class ForkedRuntime:
    """Implements `Runtime`, on CPU. without_megatron: pools whose ranks do not load Megatron"""

    def __init__(self, forks: Forks, without_megatron: Collection[str] = ()) -> None:
        self._forks, self._without_megatron = forks, without_megatron
        self._changed = threading.Condition()  # notified when a call ends

    def create_pools(
        self,
        processes_per_node: Mapping[str, Sequence[int]],
        subpool_sizes: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, ForkedPool]:
        """Create pools and wait, as `Runtime.create_pools` does."""
        pools = {}
        for name, shape in processes_per_node.items():
            size, megatron = sum(shape), name not in self._without_megatron
            store, port = worlds.open_store(LOOPBACK, size)
            sizes = (subpool_sizes or {}).get(name) or [size]
            started = [
                self._forks.start(serve_calls, name, rank, sizes, port, megatron, megatron=megatron)
                for rank in range(size)
            ]
            ranks = [Rank(connection, self._changed) for connection in started]
            pools[name] = ForkedPool(name, ranks, store)
        for pool in pools.values():
            pool.wait_until_joined()
        return pools
