"""A pool of Ray actors: one torch world, one process per device.

Ray's object store holds the rows. The driver passes Ray references on as call arguments, so Ray
brings the rows to a rank before its call begins, and forgets them when the driver has no reference
any more. If a rank failed to make rows, the calls reading them fail with its error.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import pickle
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.exceptions import (
    OutOfMemoryError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RayTaskError,
)

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster.errors import (
    DIED,
    STDERR,
    Origin,
    RuntimeTimeout,
    WorkerError,
    explain_timeout,
    stacks_when_late,
)
from mindspeed_rlxf.cluster.interface import Reply, Request
from mindspeed_rlxf.cluster.nodes import Place
from mindspeed_rlxf.cluster.refs import number_handles
from mindspeed_rlxf.cluster.worker import RoleHost, worker_error
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.data.batch import Rows
from mindspeed_rlxf.device import worlds

# How long to wait for the first failure after a lost connection was reported.
FIRST_CAUSE_S = 5.0
FIRST_LOOK_S = 0.05  # before the first poll of running calls; doubled before each further one
LONGEST_LOOK_S = 0.5


class RayWorker:
    """The Ray actor class for one pool process."""

    def __init__(self) -> None:
        self._rows: Sequence[Rows] = ()  # of the present call
        self._host: RoleHost | None = None
        self._store: dist.TCPStore | None = None
        self._timeout_s = 0.0

    def report_place(self, entry: int) -> Place:
        """Return where this process runs; `entry` is its node's index in `processes_per_node`."""
        context = ray.get_runtime_context()
        ids = itertools.chain.from_iterable(context.get_accelerator_ids().values())
        devices = tuple(int(device_id) for device_id in ids if device_id.isdigit())
        ip = ray.util.get_node_ip_address()
        return Place(socket.gethostname(), ip, entry, devices, context.get_node_id())

    def open_store(self, ip: str, world_size: int, timeout_s: float) -> int:
        """Open and keep the pool's rendezvous store on rank 0, at `ip`; return its port."""
        timeout = timedelta(seconds=timeout_s)
        self._store, port = worlds.open_store(ip, world_size, timeout)
        return port

    def join(
        self,
        origin: Origin,
        ip: str,
        kind: DeviceKind,
        threads: int,
        subpool_sizes: Sequence[int],
        timeout_s: float,
        deadline_s: float,
        store_ip: str,
        store_port: int,
        secrets: Mapping[str, str],
        megatron: bool,
    ) -> None:
        """Redirect output, set up network and device, and join the world of the pool or sub-pool.

        Waits until all pool ranks join. Raises WorkerError. Collectives use the network interface
        with `ip`, this node's address in the cluster. One sub-pool is the whole pool. A call has
        `timeout_s`, a collective `deadline_s`. Rank 0 opened the store at `store_ip`. `secrets` are
        environment variables hidden from Ray, because it would show them. `megatron`: see
        `device.setup`.
        """
        os.environ.update(secrets)
        try:
            if origin.log:
                redirect_output(Path(origin.log))
            for name, value in device.network_environment(kind, ip).items():
                os.environ.setdefault(name, value)
            faulthandler.enable(STDERR)
            ids_by_resource = ray.get_runtime_context().get_accelerator_ids()
            ids = ids_by_resource.get(device.facts(kind).ray_resource)
            assigned = str(ids[0]) if ids else None  # number on the host, or a UUID on CUDA
            device.setup(kind, threads, assigned=assigned, deadline_s=deadline_s, megatron=megatron)
            timeout = timedelta(seconds=deadline_s)
            store = self._store
            if store is None:
                store = dist.TCPStore(store_ip, store_port, sum(subpool_sizes), timeout=timeout)
            backend = device.facts(kind).backend
            worlds.join(backend, store, origin.rank, tuple(subpool_sizes), timeout)
        except Exception as error:
            raise worker_error(error, origin.role, origin.rank, origin.phase) from None
        self._host = RoleHost(origin.rank, lambda handles: [self._rows[i] for i in handles])
        self._timeout_s = timeout_s

    @ray.method(num_returns=2, enable_task_events=False)  # our timeline has the calls
    def run_request(self, message: bytes, *rows: Rows) -> tuple[Rows | None, Reply]:
        """Run a pickled request (see `RoleHost.run`), whose handles are indices into `rows`.

        A late request writes its stacks to the log.
        """
        assert self._host is not None, "this process belongs to no pool"
        self._rows = rows
        try:
            with stacks_when_late(self._timeout_s):
                return self._host.run(pickle.loads(message))
        finally:
            self._rows = ()


def redirect_output(path: Path) -> None:
    """Append all further stdout and stderr output, including C++, to the file `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for name, number in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        os.dup2(log, number)
        stream = os.fdopen(number, "w", 1, "utf-8", "replace", closefd=False)
        setattr(sys, name, stream)
    os.close(log)


@dataclass(eq=False, slots=True)
class RankCall:
    """One rank's call; also the driver's handle for the rows it returns."""

    origin: Origin
    reply: Any  # Ray's reference
    rows: Any = None  # Ray's reference, which the driver hands on and never reads
    inputs: list[RankCall] = field(default_factory=list)  # whose rows it reads, until all replied

    def __repr__(self) -> str:
        return f"rows of {self.origin.call} from rank {self.origin.rank}"

    def late_inputs(self) -> list[RankCall]:
        """Return the input calls that have not made their rows yet."""
        calls = {call.rows: call for call in self.inputs}
        if not calls:
            return []
        late = ray.wait(list(calls), num_returns=len(calls), timeout=0, fetch_local=False)[1]
        return [calls[ref] for ref in late]


# Submitted role calls of this process whose end nobody has seen, by Ray's reference of the reply.
_under_way: dict[Any, RankCall] = {}


def gather(calls: Sequence[RankCall], timeout_s: float) -> list[Any]:
    """Wait for all calls until `timeout_s` from now; return their replies in order.

    Watches all other role calls under way too: while generation runs ahead, nobody waits for the
    updates beside it.

    Raises:
        WorkerError: A call failed, noticed within LONGEST_LOOK_S; see `_find_first_cause`.
        RuntimeTimeout: At the deadline, with the late ranks.
    """
    by_ref = {call.reply: call for call in calls}
    values: dict[Any, Any] = {}
    waiting = list(by_ref)
    deadline = time.monotonic() + timeout_s
    patience_s = FIRST_LOOK_S
    while waiting:
        # Ranks mostly end together. Waiting in slices finds an early failure.
        left_s = max(min(patience_s, deadline - time.monotonic()), 0)
        ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=left_s)
        patience_s = min(2 * patience_s, LONGEST_LOOK_S)
        for reply in ready:
            _under_way.pop(reply, None)
        if not ready:
            _check_others(by_ref)
            if time.monotonic() < deadline:
                continue
            _under_way.clear()  # the run ends
            late = sorted((by_ref[ref].origin for ref in waiting), key=lambda origin: origin.rank)
            ranks = [origin.rank for origin in late]
            hosts = [origin.host for origin in late]
            raise RuntimeTimeout(late[0].call, timeout_s, ranks, hosts=hosts)
        new_values = _read_values(ready, by_ref)
        values.update(new_values)
        failures = [value for value in new_values.values() if isinstance(value, WorkerError)]
        if failures:
            _under_way.clear()  # the run ends
            raise _find_first_cause(failures, waiting, by_ref)
        _check_others(by_ref)
    return [values[call.reply] for call in calls]


def _check_others(waited: Mapping[Any, RankCall]) -> None:
    """Raise the error of a call under way that is not among those `waited` for.

    A failed call may be of a rank that a waited call needs, so its error may be an aftermath.
    """
    calls = dict(_under_way)  # in the order in which they were submitted
    if all(reply in waited for reply in calls):
        return
    ready, waiting = ray.wait(list(calls), num_returns=len(calls), timeout=0)
    others = [reply for reply in ready if reply not in waited]
    for reply in others:
        del _under_way[reply]
    values = _read_values(others, calls).values() if others else ()
    if any(isinstance(value, WorkerError) for value in values):
        _under_way.clear()  # the run ends
        # The first call of a process that died names what it did; those behind it fail too.
        ended = [reply for reply in calls if reply in set(ready)]
        all_values = _read_values(ended, calls).values()
        failed = [value for value in all_values if isinstance(value, WorkerError)]
        raise _find_first_cause(failed, waiting, calls)


def _read_values(refs: Sequence[Any], by_ref: dict[Any, RankCall]) -> dict[Any, Any]:
    """Return each ended call's reply by its reference, or its WorkerError."""
    try:
        return dict(zip(refs, ray.get(list(refs)), strict=True))
    except RayError:
        values: dict[Any, Any] = {}
    for ref in refs:
        try:
            values[ref] = ray.get(ref)
        except RayError as error:
            values[ref] = as_worker_error(error, by_ref[ref])
    return values


def as_worker_error(error: RayError, call: RankCall) -> WorkerError:
    """Return the WorkerError for the rank that raised, whose process died or whose rows were lost.

    This may be another rank, whose rows the call reads.
    """
    cause: Any = error
    while isinstance(cause, RayTaskError) and cause.cause is not None:
        cause = cause.cause
    if isinstance(cause, WorkerError):
        return cause
    lost_id = getattr(cause, "object_ref_hex", None) or getattr(cause, "actor_id", None)
    origin = call.origin
    for input_call in call.inputs:
        actor_id = input_call.reply.task_id().actor_id()
        if lost_id in (input_call.rows.hex(), actor_id.hex()):
            origin = input_call.origin
            break
    text = describe_end(cause)
    if not text.startswith(DIED):
        return origin.make_error(text)
    if origin.log:
        text += f"; its last output is in {origin.log}"
    return origin.make_error(text, remote_traceback=str(cause))


def describe_end(cause: Exception) -> str:
    """Return what a task raised, or why it has no result; begins with DIED if its process died."""
    text = str(cause)
    if not isinstance(cause, RayError):
        return f"{type(cause).__name__}: {text}"
    if isinstance(cause, RayTaskError):
        return text
    if not isinstance(cause, (RayActorError, OutOfMemoryError, OwnerDiedError)):
        return f"its result was lost ({type(cause).__name__})"
    reason = "killed, crashed or out of memory"
    if isinstance(cause, OutOfMemoryError) or "low on memory" in text:
        reason = "killed by Ray because its host ran out of memory"
    elif "node has died" in text or "raylet" in text.lower():
        reason = "Ray on its host ended, or the host"
    return f"{DIED} ({reason})"


def _find_first_cause(
    failed: list[WorkerError], waiting: list[Any], by_ref: dict[Any, RankCall]
) -> WorkerError:
    """Return the failure that caused the others: the lowest rank's that is no aftermath.

    While all are aftermath, waits up to FIRST_CAUSE_S for more failures among `waiting` replies.
    """
    deadline = time.monotonic() + FIRST_CAUSE_S
    while waiting and all(error.is_aftermath for error in failed):
        if not ray.wait(waiting, timeout=max(deadline - time.monotonic(), 0))[0]:
            break
        ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        values = _read_values(ready, by_ref).values()
        failed = failed + [value for value in values if isinstance(value, WorkerError)]
    return min(failed, key=lambda error: (error.is_aftermath, error.rank))


class RayCall:
    """A method submitted to pool ranks; implements `Call`."""

    def __init__(self, handles: Sequence[RankCall], timeout_s: float) -> None:
        self.handles = handles
        self._timeout_s = timeout_s

    def wait(self) -> list[Reply]:
        """Wait for all ranks' replies, from now; return them in order.

        Raises WorkerError, or at the deadline RuntimeTimeout with what the late ranks do.
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
    """Implements `Pool`."""

    def __init__(
        self,
        name: str,
        actors: Sequence[Any],
        places: Sequence[Place],
        placement_group: Any,
        log_dir: Path | None,
        timeout_s: float,
    ) -> None:
        self.name = name
        self.world_size = len(actors)
        self.timeout_s = timeout_s
        self.actors = actors
        self.places = places
        self._placement_group = placement_group
        self._log_dir = log_dir
        self._origins: dict[tuple[str, str], list[Origin]] = {}  # of all ranks, by role and method
        self._run = [actor.run_request.remote for actor in actors]

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
            message = pickler.dumps(request._replace(args=args))
            rows, reply = self._run[rank](message, *[call.rows for call in inputs])
            role = request.role.value
            method = request.method
            if (role, method) not in self._origins:  # of all ranks, for later calls too
                ranks = range(self.world_size)
                self._origins[role, method] = [self.origin(i, role, method) for i in ranks]
            calls.append(RankCall(self._origins[role, method][rank], reply, rows, inputs))
        _under_way.update((call.reply, call) for call in calls)
        return RayCall(calls, self.timeout_s)

    def origin(self, rank: int, role: str, phase: str) -> Origin:
        """Return where a call runs, for messages; `phase` is the method name."""
        return Origin(role, rank, self.places[rank].host, phase, self.log_of(rank))

    def log_of(self, rank: int) -> str:
        """Return a rank's log path on its host; empty if its output is not redirected."""
        if self._log_dir is None:
            return ""
        return str(self._log_dir.absolute() / self.name / f"rank_{rank:05d}.log")

    def shutdown(self) -> None:
        """Kill the processes and release their devices; does nothing a second time."""
        _under_way.clear()  # the calls of a run end together
        ray.util.remove_placement_group(self._placement_group)
