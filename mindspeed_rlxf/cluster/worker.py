"""The roles of one rank, and how their methods are run."""

import dataclasses
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster.errors import WorkerError
from mindspeed_rlxf.cluster.interface import Peer, Reply, Request
from mindspeed_rlxf.cluster.refs import Fetch, check_report, resolve_refs
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.data.batch import RoleOutput, Rows
from mindspeed_rlxf.reporting.jsonl import write_tokens

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
