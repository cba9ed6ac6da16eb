"""The part of one rank in a test all-reduce; each rank is a process of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import worlds
from mindspeed_rlxf.ops.doctor.hunt import Outcome

NUMBERS = 2**20  # fp32, 4 MiB
REPEATS = 4

_stores: dict[int, dist.TCPStore] = {}  # of the groups that this process leads, by port


@dataclass(frozen=True)
class Task:
    """Arguments of one rank's all-reduce.

    ip, port:  of the TCPStore that the group meets at
    timeout_s: longest wait for the other ranks, in each step
    """

    kind: DeviceKind
    ip: str
    port: int
    rank: int
    world_size: int
    timeout_s: float


def warm_up() -> int:
    """Return this process's id; the call itself makes the process import torch."""
    return os.getpid()


def open_store(ip: str) -> int:
    """Open a TCPStore in this process, on a free port, and keep it open; return the port.

    ip: address to listen on. Closes the stores that earlier calls opened.
    """
    _stores.clear()
    store, port = worlds.open_store(ip)
    _stores[port] = store
    return port


def all_reduce(task: Task) -> Outcome:
    """Join the process group, all-reduce, check the sum and leave the group.

    Raises only what leaving the group raises. The outcome of another failure has its cause and the
    ranks, as numbers in the group, that did not come.
    """
    store: dist.Store | None = None
    try:
        timeout = timedelta(seconds=task.timeout_s)
        store = _stores.get(task.port) or dist.TCPStore(
            task.ip, task.port, is_master=False, timeout=timeout
        )
        store.set_timeout(timeout)
        store.set(_key(task.rank), "")
        _check_sum(task, store, timeout)
        return Outcome(True)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return Outcome(False, _absent_ranks(task, store), cause)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _check_sum(task: Task, store: dist.Store, timeout: timedelta) -> None:
    """Join the process group and all-reduce `rank + 1` REPEATS times.

    Raises ValueError for a wrong sum. The process group stays open.
    """
    place = device.select_first_device(task.kind)
    dist.init_process_group(
        device.backend(task.kind),
        store=dist.PrefixStore("group", store),
        rank=task.rank,
        world_size=task.world_size,
        timeout=timeout,
    )
    wanted = task.world_size * (task.world_size + 1) // 2  # 1 + 2 + ... + world_size
    numbers = torch.empty(NUMBERS, device=place)
    for _ in range(REPEATS):
        numbers.fill_(task.rank + 1)
        dist.all_reduce(numbers)
        if not bool((numbers == wanted).all()):
            found = f"{numbers.min():g} to {numbers.max():g}"
            raise ValueError(f"the sum is wrong: {found}, not {wanted}")


def _key(rank: int) -> str:
    return f"here/{rank}"


def _absent_ranks(task: Task, store: dist.Store | None) -> tuple[int, ...]:
    """Return the ranks, as numbers in the group, that never came; () if the store is gone."""
    try:
        if store is None:
            return ()
        return tuple(rank for rank in range(task.world_size) if not store.check([_key(rank)]))
    except Exception:  # the store is gone with its leader, whose call reports that
        return ()
