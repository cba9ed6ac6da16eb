"""One worker process: its log, device and torch.distributed world, and the roles of its rank."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster.diagnosis import STDERR, stacks_when_late
from mindspeed_rlxf.cluster.errors import WorkerError
from mindspeed_rlxf.cluster.protocol import Peer, Reply, Request
from mindspeed_rlxf.cluster.refs import Fetch, check_report, resolve_refs
from mindspeed_rlxf.config.enums import DeviceKind, Role
from mindspeed_rlxf.data.batch import RoleOutput, Rows
from mindspeed_rlxf.device import worlds
from mindspeed_rlxf.engine import residency, shared_groups
from mindspeed_rlxf.reporting.sample_tokens import write_tokens

# Messages of collectives that have lost another rank.
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote process exited",
)


class RoleHost:
    """Holds the role objects of one rank and runs their methods."""

    def __init__(self, rank: int, fetch: Fetch) -> None:
        """Start without roles. rank: in the pool; fetch: returns the rows of handles"""
        self._rank, self._fetch = rank, fetch
        self._roles: dict[Role, Any] = {}

    def run(self, request: Request) -> tuple[Rows | None, Reply]:
        """Run the method on the rows it asks for; return its rows, and the reply to the driver.

        Any Exception becomes a WorkerError, whose traceback is printed; that of a rank whose rows
        are needed is raised unchanged. Only leaders (`keeps_rows`) return rows and a report.
        """
        try:
            args = resolve_refs(request.args, self._fetch)
            device.reset_peak_memory()
            began, started = time.time(), time.perf_counter()
            output = self._as_output(request, self._find_method(request)(*self._with_peers(args)))
            device.synchronize()
            seconds = time.perf_counter() - started
            check_report(output.report, request.role.value, request.method)
            rows, report = (output.rows, output.report) if request.keeps_rows else (None, None)
            if request.keeps_rows and (tokens := output.token_rows) is not None:
                log = tokens.log
                write_tokens(Path(log.folder), self._rank, log.iteration, tokens.as_lists())
            found, wanted = None if rows is None else rows.num_rows, request.num_rows
            assert wanted is None or found in (None, wanted), (
                f"returned {found} rows, its inputs say {wanted}"
            )
            reply = Reply(report, found, seconds, self._rank, began, device.peak_memory())
            return None if rows is None else to_host(rows), reply
        except WorkerError:
            raise
        except Exception as error:
            raise worker_error(error, request.role.value, self._rank, request.method) from error

    def _find_method(self, request: Request) -> Callable[..., Any]:
        """Return the role's factory, or the method of the role or of its engine."""
        if request.factory is not None:
            return request.factory
        role = self._get_role(request.role)
        found: Callable[..., Any] = getattr(
            role.engine if request.of_engine else role, request.method
        )
        return found

    def _with_peers(self, args: tuple[Any, ...]) -> list[Any]:
        """Replace each Peer by this process's object of that role."""
        return [self._get_role(arg.role) if isinstance(arg, Peer) else arg for arg in args]

    def _as_output(self, request: Request, result: Any) -> RoleOutput:
        """Keep a built role; make an engine's result a report. A role returns a RoleOutput."""
        if request.factory is not None:
            self._roles[request.role] = result
            return RoleOutput()
        if request.of_engine:
            return RoleOutput(report=result)
        assert isinstance(result, RoleOutput), (
            f"{request.method} must return a RoleOutput, got {type(result).__name__}"
        )
        return result

    def _get_role(self, role: Role) -> Any:
        hosted = self._roles.get(role)
        assert hosted is not None, f"{role.value} has not been built in this process"
        return hosted


def worker_error(error: Exception, role: str, rank: int, phase: str) -> WorkerError:
    """Print the traceback to stderr, and return the WorkerError of this rank.

    Its cause is `ValueError: text`; its `is_aftermath` is True for torch's network errors and
    RuntimeErrors with a text of LOST_PEER, which the end of another rank causes.
    """
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    message = str(error)
    lost_peer = isinstance(error, RuntimeError) and any(word in message for word in LOST_PEER)
    return WorkerError(
        role=role,
        rank=rank,
        host=socket.gethostname(),
        phase=phase,
        cause=f"{type(error).__name__}: {message}" if message else type(error).__name__,
        remote_traceback=text,
        is_aftermath=lost_peer or isinstance(error, dist.DistNetworkError),
        errno=getattr(error, "errno", None),
    )


def to_host(rows: Rows) -> Rows:
    """Return the rows with each tensor detached and on the host, in a storage of exactly its size.

    Pickling a view would send the whole storage. Other values are unchanged.
    """
    columns = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
    for name, column in columns.items():
        if isinstance(column, torch.Tensor):
            columns[name] = found = column.detach().cpu()
            if found.untyped_storage().nbytes() != found.numel() * found.element_size():
                columns[name] = found.clone()
    return type(rows)(**columns)


@dataclass(frozen=True)
class ProcessSetup:
    """The rank of a process in its pool, and the settings with which it starts."""

    pool: str
    rank: int
    world_size: int
    device_kind: DeviceKind
    threads: int
    timeout_s: float  # the driver's deadline of a call
    collective_timeout_s: float  # longest wait of ranks for each other
    log_dir: str | None  # of the run; None leaves stdout and stderr alone
    ip: str  # of this process's node, as the cluster knows it: collectives use its interface
    parts: tuple[int, ...] = ()  # sizes of the pool's parts; empty = the pool is one world


def log_of(setup: ProcessSetup) -> str | None:
    """Return the path of a process's log on its host; None where output is not redirected."""
    if setup.log_dir is None:
        return None
    return f"{setup.log_dir}/{setup.pool}/rank_{setup.rank:05d}.log"


class WorkerProcess:
    """One process of a pool; free of Ray."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._host: RoleHost | None = None
        self._store: dist.TCPStore | None = None
        self._timeout_s = 0.0

    def open_store(self, ip: str, world_size: int, timeout_s: float) -> int:
        """Open and keep the rendezvous store of the pool on rank 0, at `ip`; return its port."""
        timeout = timedelta(seconds=timeout_s)
        self._store, port = worlds.open_store(ip, world_size, timeout)
        return port

    def start(self, setup: ProcessSetup, ip: str, port: int, assigned: str | None = None) -> None:
        """Redirect output, set up network and device, and join the world of the pool or part.

        Waits until all ranks of the pool join. Raises ValueError if the device cannot be set up.
        ip, port: of the rendezvous store, which rank 0 opened
        assigned: number on the host of the device that Ray gave this process; None = none
        """
        if (log := log_of(setup)) is not None:
            redirect_output(Path(log))
        for name, value in device.network_environment(setup.device_kind, setup.ip).items():
            os.environ.setdefault(name, value)
        faulthandler.enable(STDERR)
        deadline_s = setup.collective_timeout_s
        device.setup(setup.device_kind, setup.threads, assigned=assigned, deadline_s=deadline_s)
        timeout = timedelta(seconds=deadline_s)
        store = self._store or dist.TCPStore(ip, port, setup.world_size, timeout=timeout)
        parts = setup.parts or (setup.world_size,)
        worlds.join(device.backend(setup.device_kind), store, setup.rank, parts, timeout)
        self._host, self._timeout_s = RoleHost(setup.rank, self._fetch), setup.timeout_s

    def run(self, request: Request) -> tuple[Rows | None, Reply]:
        """Run a request (see `RoleHost.run`); a late one writes the stacks to the log."""
        assert self._host is not None, "this process belongs to no pool"
        with stacks_when_late(self._timeout_s):
            return self._host.run(request)

    def reset(self) -> None:
        """Leave the pool: drop all roles, the store, groups and the torch world."""
        self._host = self._store = None
        shared_groups.forget()
        residency.forget()
        gc.collect()
        worlds.leave()
        freeze_imports()


def freeze_imports() -> None:
    """Exempt all present objects, chiefly modules, once from garbage collection: it is slow."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def redirect_output(path: Path) -> None:
    """Append all further stdout and stderr of this process, C++ included, to the file `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for name, number in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        os.dup2(log, number)
        stream = os.fdopen(number, "w", 1, "utf-8", "replace", closefd=False)
        setattr(sys, name, stream)
    os.close(log)
