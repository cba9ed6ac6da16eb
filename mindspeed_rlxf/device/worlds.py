"""The torch.distributed world of a process, and in a split pool a group over all its worlds.

The processes of a split pool form one world for each part. Its ranks count from 0, and Megatron
sees only these. One more group spans all parts, for transfers between them. torch makes groups only
inside a world, so this group is made by the function that `init_process_group` itself calls.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_whole_pool: dist.ProcessGroup | None = None
_timeout = timedelta(minutes=30)  # torch's default, until a world is joined


def open_store(
    ip: str, world_size: int | None = None, timeout: timedelta = timedelta(minutes=5)
) -> tuple[dist.TCPStore, int]:
    """Open a rendezvous store on a free port of `ip`; returns it and the port, without waiting.

    The port is bound before the store is made, so that no other process can get it in between.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    listener.bind((ip, 0))
    listener.listen(world_size or 1024)
    port = int(listener.getsockname()[1])

    def make(**how: Any) -> dist.TCPStore:
        return dist.TCPStore(
            ip,
            port,
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
            **how,
        )

    try:
        store = make()
    except NotImplementedError:  # with libuv, torch 2.7 takes no socket that is open
        store = make(use_libuv=False)
    listener.detach()
    return store, port


def part_rank(rank: int, parts: Sequence[int]) -> tuple[int, int]:
    """Return (part, rank in that part) of a rank of the pool. parts: number of ranks of each"""
    for part, end in enumerate(accumulate(parts)):
        if rank < end:
            return part, rank - (end - parts[part])
    raise AssertionError(f"rank {rank} is beyond the parts {tuple(parts)}")


def join(
    backend: str, store: dist.Store, rank: int, parts: Sequence[int], timeout: timedelta
) -> None:
    """Join the world of this rank's part of the pool, and in a split pool the group over all parts.

    parts: sizes of the parts; a single one = the pool is one world
    Returns when every rank of the pool has called it.
    """
    global _whole_pool, _timeout
    _timeout = timeout
    part, own_rank = part_rank(rank, parts)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"part{part}", store),
        rank=own_rank,
        world_size=parts[part],
        timeout=timeout,
    )
    if len(parts) > 1:
        _whole_pool = _group_across(backend, store, rank, sum(parts), timeout)


def _group_across(
    backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a group over several worlds. `src` and `dst` of its collectives are its own ranks."""
    make: Any = distributed_c10d._new_process_group_helper
    # Without a list of ranks HCCL treats the group as the default one. torch looks up the rank of
    # this process within its part in the list, which has it: the list has all numbers below the
    # size of the pool.
    ranks = list(range(size))
    pool = dist.PrefixStore("pool", store)
    group, _ = make(size, rank, ranks, backend, pool, group_name="pool", timeout=timeout)
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    assert isinstance(group, dist.ProcessGroup), "every rank of the pool is a member"
    return group


def timeout_minutes() -> int:
    """Return the timeout of this world's collectives, rounded up, for groups made inside it."""
    return math.ceil(_timeout.total_seconds() / 60)


def set_timeout(groups: Iterable[dist.ProcessGroup]) -> None:
    """Set the timeout of this process's world, in whole minutes, for groups made without one.

    Megatron passes no timeout for the gradients of experts, and torch's default is half an hour.
    HCCL's groups use its variables instead (`npu.set_timeouts`). For a gloo group the timeout is
    set on its CPU backend: torch's own function would also look up the CUDA backend, for which
    torch_npu substitutes NPU, and gloo has none.
    """
    timeout = timedelta(minutes=timeout_minutes())
    for group in groups:
        kinds = {device.type for device in group._device_types}
        if "cpu" in kinds:
            group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
        elif "cuda" in kinds:
            distributed_c10d._set_pg_timeout(timeout, group)


def whole_pool() -> dist.ProcessGroup:
    """Return the group of all ranks of a split pool."""
    assert _whole_pool is not None, "the pool of this process is not split"
    return _whole_pool


def leave() -> None:
    """End all groups of this process."""
    global _whole_pool
    _whole_pool = None
    if dist.is_initialized():
        dist.destroy_process_group()
