"""The roles on one rank, their method calls, and worker environment variables."""

import dataclasses
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster.errors import WorkerError
from mindspeed_rlxf.cluster.interface import Peer, Reply, Request
from mindspeed_rlxf.cluster.refs import Fetch, resolve_refs
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.secrets import Secret, variable_secret
from mindspeed_rlxf.data.batch import RoleOutput, Rows
from mindspeed_rlxf.engine import flop_counter
from mindspeed_rlxf.reporting.jsonl import write_tokens

FORWARDED = ("HCCL_", "ASCEND_", "GLOO_", "TP_", "NCCL_")  # settings of communication libraries
FORWARDED_NAMES = (  # torch on NPU, and what `training.deterministic` sets beside HCCL's
    "TASK_QUEUE_ENABLE",
    "CPU_AFFINITY_CONF",
    "PYTORCH_NPU_ALLOC_CONF",
    "CLOSE_MATMUL_K_SHIFT",
    "ATB_MATMUL_SHUFFLE_K_ENABLE",
    "LCCL_DETERMINISTIC",
)
# Messages of collectives that have lost another rank.
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote process exited",
)


class RoleHost:
    """Holds one rank's role objects and runs their methods."""

    def __init__(self, rank: int, fetch: Fetch) -> None:
        self._rank, self._fetch = rank, fetch
        self._roles: dict[Role, Any] = {}

    def run(self, request: Request) -> tuple[Rows | None, Reply]:
        """Run the method on the rows it asks for; return its rows, and the reply to the driver.

        Only leaders (`keeps_rows`) return rows and a report. Raises WorkerError for any Exception,
        and prints its traceback; a WorkerError from a rank whose rows are needed stays unchanged.
        """
        try:
            args = resolve_refs(request.args, self._fetch)
            args = [self._get_role(arg.role) if isinstance(arg, Peer) else arg for arg in args]
            device.reset_peak_memory()
            flop_counter.take()
            began, started = time.time(), time.perf_counter()
            if request.factory is not None:
                self._roles[request.role], output = request.factory(*args), RoleOutput()
            elif request.of_engine:
                engine = self._get_role(request.role).engine
                output = RoleOutput(report=getattr(engine, request.method)(*args))
            else:
                output = getattr(self._get_role(request.role), request.method)(*args)
                assert isinstance(output, RoleOutput), (
                    f"{request.method} must return a RoleOutput, got {type(output).__name__}"
                )
            device.synchronize()
            seconds = time.perf_counter() - started
            memory, done = device.peak_memory(), flop_counter.take()
            if not request.keeps_rows:
                return None, Reply(None, None, seconds, self._rank, began, memory, done)
            if (tokens := output.token_rows) is not None:
                log = tokens.log
                write_tokens(Path(log.folder), self._rank, log.iteration, tokens.as_lists())
            rows, wanted = output.rows, request.num_rows
            count = None if rows is None else rows.num_rows
            assert wanted is None or count in (None, wanted), (
                f"returned {count} rows, its inputs say {wanted}"
            )
            reply = Reply(output.report, count, seconds, self._rank, began, memory, done)
            return None if rows is None else to_host(rows), reply
        except WorkerError:
            raise
        except Exception as error:
            raise worker_error(error, request.role.value, self._rank, request.method) from error

    def _get_role(self, role: Role) -> Any:
        assert role in self._roles, f"{role.value} has not been built in this process"
        return self._roles[role]


def worker_error(error: Exception, role: str, rank: int, phase: str) -> WorkerError:
    """Print the traceback to stderr, and return this rank's WorkerError.

    `is_aftermath` is True for torch network errors and LOST_PEER messages, caused by another
    rank's end.
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
    """Detach tensors and move them to the host, in storages with exactly their size.

    Pickling a view would send the whole storage.
    """
    columns = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
    for name, column in columns.items():
        if isinstance(column, torch.Tensor):
            columns[name] = found = column.detach().cpu()
            if found.untyped_storage().nbytes() != found.numel() * found.element_size():
                columns[name] = found.clone()
    return type(rows)(**columns)


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, Secret]:
    """Return the variables in FORWARDED and FORWARDED_NAMES, but no lists of visible devices."""
    return {
        name: variable_secret(name, value)
        for name, value in environment.items()
        if (name.startswith(FORWARDED) or name in FORWARDED_NAMES) and "VISIBLE_DEVICES" not in name
    }


def worker_environment(given: Mapping[str, Secret], inherits: bool) -> dict[str, Secret]:
    """Return the variables to set for a worker; `resource_pool.env` (`given`) takes precedence.

    A worker that inherits the driver's environment needs only `given`.
    """
    return dict(given) if inherits else {**forwarded_environment(os.environ), **given}


def offload_environment(config: RunConfig) -> dict[str, str]:
    """Return allocator variables for a run with offload, except those the user has set.

    None with vLLM: its servers open memory by handle, which for expandable segments needs the
    system call pidfd_getfd, refused in containers.
    """
    offloads = [config.role(role).offload for role in config.roles]
    if config.runs_vllm or not any(offload.weights or offload.optimizer for offload in offloads):
        return {}
    given = {*os.environ, *config.pool_settings.env}
    wanted = device.shared_memory_environment(config.device.kind)
    return {name: value for name, value in wanted.items() if name not in given}


def list_variables(
    given: Mapping[str, Secret], offloading: Mapping[str, str] | None = None
) -> list[tuple[str, str, str]]:
    """Return (name, value, source) per worker variable, sorted by name; secrets are `***`."""
    sources: dict[str, Mapping[str, object]] = {
        "driver": forwarded_environment(os.environ),
        "resource_pool.env": given,
        "offload": offloading or {},
    }
    found = {n: (n, str(v), source) for source, held in sources.items() for n, v in held.items()}
    return [found[name] for name in sorted(found)]
