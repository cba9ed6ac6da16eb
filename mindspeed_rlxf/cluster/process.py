"""One worker process from start to end: log file, device, torch.distributed world, roles."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster.protocol import Reply, Request
from mindspeed_rlxf.cluster.refs import Fetch
from mindspeed_rlxf.cluster.witness import show_stacks_on_signal
from mindspeed_rlxf.cluster.worker import RoleHost
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.data.batch import Rows
from mindspeed_rlxf.device import worlds
from mindspeed_rlxf.engine import shared_groups
from mindspeed_rlxf.files.printable import CODEC
from mindspeed_rlxf.files.safe import PRIVATE, make_private_folder, open_file


@dataclass(frozen=True)
class ProcessSetup:
    """What a process has to know to take its place in a pool."""

    pool: str
    rank: int
    world_size: int
    device_kind: DeviceKind
    threads: int
    collective_timeout_s: float  # longest wait of ranks for each other
    log_dir: str | None  # of the run; None leaves stdout and stderr alone
    ip: str  # of this process's node, as the cluster knows it: collectives use its interface
    log_mode: int = PRIVATE
    parts: tuple[int, ...] = ()  # sizes of the pool's parts; empty = the pool is one world


def log_of(setup: ProcessSetup) -> str | None:
    """The file that gets a process's output, on its host."""
    if setup.log_dir is None:
        return None
    return f"{setup.log_dir}/{setup.pool}/rank_{setup.rank:05d}.log"


class WorkerProcess:
    """Owned by the runtime's actor, one per process; free of any Ray name."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._host: RoleHost | None = None
        self._store: dist.TCPStore | None = None

    def open_store(self, ip: str, world_size: int, timeout_s: float) -> int:
        """Rank 0 opens the rendezvous store of its pool on `ip`; returns the port."""
        timeout = timedelta(seconds=timeout_s)
        self._store, port = worlds.open_store(ip, world_size, timeout)
        return port

    def start(self, setup: ProcessSetup, ip: str, port: int, assigned: str | None = None) -> None:
        """Join the pool's world, or that of a part; returns when every rank has.

        assigned: number of the device that Ray gave this process, as the host counts
        """
        if (log := log_of(setup)) is not None:
            redirect_output(Path(log), setup.log_mode)
        for name, value in device.network_environment(setup.device_kind, setup.ip).items():
            os.environ.setdefault(name, value)
        show_stacks_on_signal()
        deadline_s = setup.collective_timeout_s
        device.setup(setup.device_kind, setup.threads, assigned=assigned, deadline_s=deadline_s)
        timeout = timedelta(seconds=deadline_s)
        store = self._store or dist.TCPStore(ip, port, setup.world_size, timeout=timeout)
        parts = setup.parts or (setup.world_size,)
        worlds.join(device.backend(setup.device_kind), store, setup.rank, parts, timeout)
        self._host = RoleHost(setup.rank, self._fetch)

    def run(self, request: Request) -> tuple[Rows | None, Reply]:
        assert self._host is not None, "this process belongs to no pool"
        return self._host.run(request)

    def reset(self) -> None:
        """Leave the pool: drop roles and world, keep the process and what it imported."""
        self._host = self._store = None
        shared_groups.forget()
        gc.collect()
        worlds.leave()
        if not gc.get_freeze_count():
            # The imports: looking through all of them takes the next call a second. Once only: what
            # a frame still holds now, such as a role's groups with their threads, would stay.
            gc.freeze()


def redirect_output(path: Path, mode: int = PRIVATE) -> None:
    """Append all further output of this process, C++ included, to `path`."""
    if not path.parent.parent.exists():
        make_private_folder(path.parent.parent, mode)  # on a host with folders of its own
    make_private_folder(path.parent, mode)
    with open_file(path, "ab", mode) as stream:
        log = os.dup(stream.fileno())
    for name, number in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        os.dup2(log, number)
        stream = os.fdopen(number, "w", 1, CODEC, "replace", closefd=False)
        setattr(sys, name, stream)
    os.close(log)
