"""One rank's part in an all-reduce of a group; runs in a process of its own on each rank."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import bare, worlds
from mindspeed_rlxf.ops.doctor.hunt import Outcome

NUMBERS = 2**20  # fp32, 4 MiB
REPEATS = 3

_stores: dict[int, dist.TCPStore] = {}  # of the groups that this process leads, by port


@dataclass(frozen=True)
class Task:
    """ip, port: of the group's store; number: of this round, the same in a group."""

    kind: DeviceKind
    ip: str
    port: int
    rank: int
    world_size: int
    timeout_s: float


def warm_up() -> int:
    """That it answers means that this module, and torch with it, is imported."""
    return os.getpid()


def open_store(ip: str) -> int:
    """The group's leader opens its store on a free port."""
    _stores.clear()
    store, port = worlds.open_store(ip)
    _stores[port] = store
    return port


def all_reduce(task: Task) -> Outcome:
    """Joins the group, sums, checks the sum, leaves. What goes wrong is in the outcome."""
    store: dist.Store | None = None
    try:
        timeout = timedelta(seconds=task.timeout_s)
        store = _stores.get(task.port) or dist.TCPStore(
            task.ip, task.port, is_master=False, timeout=timeout
        )
        store.set_timeout(timeout)
        store.set(_key(task.rank), "")
        return Outcome(True, _measure(task, store, timeout))
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return Outcome(False, 0.0, _absent(task, store), said)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _measure(task: Task, store: dist.Store, timeout: timedelta) -> float:
    """Median seconds of an all-reduce. Raises ValueError for a wrong sum."""
    place, wait = bare.select(task.kind), bare.waiter(task.kind)
    dist.init_process_group(
        device.backend(task.kind),
        store=dist.PrefixStore("group", store),
        rank=task.rank,
        world_size=task.world_size,
        timeout=timeout,
    )
    numbers, seconds = torch.empty(NUMBERS, device=place), []
    for _ in range(REPEATS + 1):  # the first opens connections
        numbers.fill_(task.rank + 1)
        wait()
        started = time.perf_counter()
        dist.all_reduce(numbers)
        wait()
        seconds.append(time.perf_counter() - started)
    wanted = task.world_size * (task.world_size + 1) // 2  # 1 + 2 + ... + world_size
    if not bool((numbers == wanted).all()):
        raise ValueError(f"the sum is wrong: {numbers.min():g} to {numbers.max():g}, not {wanted}")
    return statistics.median(seconds[1:])


def _key(rank: int) -> str:
    return f"here/{rank}"


def _absent(task: Task, store: dist.Store | None) -> tuple[int, ...]:
    """Ranks of the group that never came to its store."""
    try:
        if store is None:
            return ()
        return tuple(rank for rank in range(task.world_size) if not store.check([_key(rank)]))
    except Exception:  # the store is gone with its leader, which is told otherwise
        return ()
