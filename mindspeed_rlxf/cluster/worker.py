"""The process side: the role objects of one rank and the one way their methods are run."""

from __future__ import annotations

import dataclasses
import socket
import sys
import time
import traceback
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster.errors import WorkerError
from mindspeed_rlxf.cluster.guard import check_report
from mindspeed_rlxf.cluster.protocol import Peer, Reply, Request
from mindspeed_rlxf.cluster.refs import Fetch, resolve_refs
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.data.batch import RoleOutput, Rows

# What collectives say when another rank went away.
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote process exited",
)


class RoleHost:
    """Hosts the roles of one rank."""

    def __init__(self, rank: int, fetch: Fetch) -> None:
        """fetch: gets rows by their handles."""
        self._rank, self._fetch = rank, fetch
        self._roles: dict[Role, Any] = {}

    def run(self, request: Request) -> tuple[Rows | None, Reply]:
        """The rows to keep and the reply to the driver. Raises WorkerError, nothing else.

        A WorkerError of the rank whose rows were needed passes through unchanged.
        """
        try:
            args = resolve_refs(request.args, self._fetch)
            began, started = time.time(), time.perf_counter()
            output = self._invoke(request, args)
            device.synchronize()
            seconds = time.perf_counter() - started
            rows, reply = self._checked(request, output, seconds)
            return rows, replace(reply, rank=self._rank, started=began)
        except WorkerError:
            raise
        except Exception as error:
            raise worker_error(error, request.role.value, self._rank, request.method) from error

    def _invoke(self, request: Request, args: tuple[Any, ...]) -> RoleOutput:
        args = tuple(self._hosted(arg.role) if isinstance(arg, Peer) else arg for arg in args)
        if request.factory is not None:
            self._roles[request.role] = request.factory(*args)
            return RoleOutput()
        output = getattr(self._hosted(request.role), request.method)(*args)
        assert isinstance(output, RoleOutput), (
            f"{request.method} must return a RoleOutput, got {type(output).__name__}"
        )
        return output

    def _hosted(self, role: Role) -> Any:
        hosted = self._roles.get(role)
        assert hosted is not None, f"{role.value} has not been built in this process"
        return hosted

    @staticmethod
    def _checked(request: Request, output: RoleOutput, seconds: float) -> tuple[Rows | None, Reply]:
        check_report(output.report, request.role.value, request.method)
        if not request.keeps_rows:
            return None, Reply(None, None, seconds)
        if output.rows is None:
            return None, Reply(output.report, None, seconds)
        found, wanted = output.rows.num_rows, request.num_rows
        assert wanted is None or found == wanted, f"returned {found} rows, its inputs say {wanted}"
        return to_host(output.rows), Reply(output.report, found, seconds)


def worker_error(error: Exception, role: str, rank: int, phase: str) -> WorkerError:
    """Say who failed and print the traceback into this rank's log."""
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
    )


def to_host(rows: Rows) -> Rows:
    """The same rows in host memory; a view is copied, so that not its whole storage travels."""
    columns = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
    return type(rows)(**{name: _compact(column) for name, column in columns.items()})


def _compact(column: Any) -> Any:
    if not isinstance(column, torch.Tensor):
        return column
    column = column.detach().cpu()
    if column.untyped_storage().nbytes() == column.numel() * column.element_size():
        return column
    return column.clone()
