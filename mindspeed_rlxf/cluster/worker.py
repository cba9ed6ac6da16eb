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
from mindspeed_rlxf.cluster.interface import ColocatedRole, Reply, Request
from mindspeed_rlxf.cluster.refs import Fetch, resolve_refs
from mindspeed_rlxf.config.enums import DeviceKind, Role
from mindspeed_rlxf.config.schema import LearningConfig, RunConfig
from mindspeed_rlxf.config.secrets import Secret, variable_secret
from mindspeed_rlxf.data.batch import RoleOutput, Rows
from mindspeed_rlxf.engine import flop_counter
from mindspeed_rlxf.reporting.jsonl import write_tokens

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # queues between a process and its device
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
        self._rank = rank
        self._fetch = fetch
        self._roles: dict[Role, Any] = {}

    def run(self, request: Request) -> tuple[Rows | None, Reply]:
        """Run the method on the rows it asks for; return its rows, and the reply to the driver.

        Only leaders (`is_leader`) return rows and a report. Raises WorkerError for any Exception,
        and prints its traceback; a WorkerError from a rank whose rows are needed stays unchanged.
        """
        try:
            args = resolve_refs(request.args, self._fetch)
            args = [
                self._get_role(arg.role) if isinstance(arg, ColocatedRole) else arg for arg in args
            ]
            device.reset_peak_memory()
            flop_counter.take()
            started_at = time.time()  # by the host's clock
            started = time.perf_counter()
            if request.factory is not None:
                self._roles[request.role] = request.factory(*args)
                output = RoleOutput()
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
            measured = (seconds, self._rank, started_at, device.peak_memory(), flop_counter.take())
            if not request.is_leader:
                return None, Reply(None, None, *measured)
            tokens = output.token_rows
            if tokens is not None:
                log = tokens.log
                write_tokens(Path(log.folder), self._rank, log.iteration, tokens.as_lists())
            rows = output.rows
            if rows is None:
                return None, Reply(output.report, None, *measured)
            assert request.num_rows in (None, rows.num_rows), (
                f"returned {rows.num_rows} rows, its inputs say {request.num_rows}"
            )
            return to_host(rows), Reply(output.report, rows.num_rows, *measured)
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
            on_host = column.detach().cpu()
            num_bytes = on_host.numel() * on_host.element_size()
            if on_host.untyped_storage().nbytes() != num_bytes:
                on_host = on_host.clone()
            columns[name] = on_host
    return type(rows)(**columns)


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, Secret]:
    """Return the variables in FORWARDED and FORWARDED_NAMES, but no lists of visible devices."""
    variables = {}
    for name, value in environment.items():
        is_forwarded = name.startswith(FORWARDED) or name in FORWARDED_NAMES
        if is_forwarded and "VISIBLE_DEVICES" not in name:
            variables[name] = variable_secret(name, value)
    return variables


def worker_environment(pool_env: Mapping[str, Secret], inherits: bool) -> dict[str, Secret]:
    """Return the variables to set for a worker; `resource_pool.env` (`pool_env`) has precedence.

    A worker that inherits the driver's environment needs only `pool_env`.
    """
    return dict(pool_env) if inherits else {**forwarded_environment(os.environ), **pool_env}


def offload_environment(config: RunConfig) -> dict[str, str]:
    """Return allocator variables for a run with offload, except those the user has set.

    None with vLLM: its servers open memory by handle, which for expandable segments needs the
    system call pidfd_getfd, refused in containers.
    """
    offloads = [config.role(role).offload for role in config.roles]
    if config.runs_vllm or not any(offload.weights or offload.optimizer for offload in offloads):
        return {}
    set_by_user = {*os.environ, *config.pool_settings.env}
    variables = device.shared_memory_environment(config.device.kind)
    return {name: value for name, value in variables.items() if name not in set_by_user}


def layout_environment(config: RunConfig) -> dict[str, str]:
    """Return the variable that TP needs in training on CUDA, except if the user has set it.

    With one queue a collective starts before the GEMM that is launched behind it, so that both
    overlap; Megatron relies on it.
    """
    is_set = CONNECTIONS in os.environ or CONNECTIONS in config.pool_settings.env
    if is_set or device.resolve_kind(config.device.kind) is not DeviceKind.CUDA:
        return {}
    sections = [config.role(role) for role in config.roles]
    has_tp = any(
        section.tensor_model_parallel_size > 1
        for section in sections
        if isinstance(section, LearningConfig)
    )
    return {CONNECTIONS: "1"} if has_tp else {}


def list_variables(
    pool_env: Mapping[str, Secret],
    offloading: Mapping[str, str] | None = None,
    layout: Mapping[str, str] | None = None,
) -> list[tuple[str, str, str]]:
    """Return (name, value, source) per worker variable, sorted by name; secrets are `***`."""
    sources: dict[str, Mapping[str, object]] = {
        "driver": forwarded_environment(os.environ),
        "resource_pool.env": pool_env,
        "offload": offloading or {},
        "tensor_model_parallel_size": layout or {},
    }
    rows = {}
    for source, variables in sources.items():
        for name, value in variables.items():
            rows[name] = (name, str(value), source)
    return [rows[name] for name in sorted(rows)]
