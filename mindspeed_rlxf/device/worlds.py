"""The torch.distributed world of a process, and the group between worlds of a disaggregated pool.

The processes of each part of a disaggregated pool form a world. Its ranks count from 0, and
Megatron sees
only these. One more group takes weights from the first part to the others: it has the first rank of
the pool and all ranks of the other parts. torch makes groups only inside a world, so this group is
made by the function that `init_process_group` calls.
"""

import math
import socket
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

Layout = tuple[int, int, int]  # tensor, pipeline and expert parallel size

_weights_group: dist.ProcessGroup | None = None
_groups: dict[Layout, dict[str, Any]] = {}  # globals of Megatron, which hold its groups
_timeout = timedelta(minutes=30)  # torch's default, until a world is joined


def open_store(
    ip: str, world_size: int | None = None, timeout: timedelta = timedelta(minutes=5)
) -> tuple[dist.TCPStore, int]:
    """Start a rendezvous store on a free port of `ip`; return it and the port without waiting.

    The port is bound before the store is made, so that no other process can take it in between.

    Args:
        world_size: None = not fixed.
        timeout: Longest wait for a key of the store.

    Raises:
        OSError: This host cannot listen on `ip`.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    listener.bind((ip, 0))
    listener.listen(world_size or 1024)
    port = int(listener.getsockname()[1])

    how: dict[str, Any] = {
        "is_master": True,
        "timeout": timeout,
        "wait_for_workers": False,
        "master_listen_fd": listener.fileno(),
    }
    try:
        store = dist.TCPStore(ip, port, world_size, **how)
    except NotImplementedError:  # with libuv, torch 2.7 takes no socket that is open
        store = dist.TCPStore(ip, port, world_size, use_libuv=False, **how)
    listener.detach()
    return store, port


def part_rank(rank: int, parts: Sequence[int]) -> tuple[int, int]:
    """Return (index of the part, rank in it) of a rank of the pool. parts: sizes"""
    for part, end in enumerate(accumulate(parts)):
        if rank < end:
            return part, rank - (end - parts[part])
    raise AssertionError(f"rank {rank} is beyond the parts {tuple(parts)}")


def join(
    backend: str, store: dist.Store, rank: int, parts: Sequence[int], timeout: timedelta
) -> None:
    """Initialise torch.distributed with the ranks of this rank's part of the pool as the world.

    In a pool with several parts, also create `weights_group`. With gloo it blocks until every rank
    of the groups has called it; NCCL and HCCL connect at the first collective.

    Args:
        rank: In the pool.
        parts: Number of ranks of each part, in the order of ranks.
        timeout: Of these groups; `timeout_minutes` returns it for groups that are created later.
    """
    global _weights_group, _timeout
    _timeout = timeout
    part, own_rank = part_rank(rank, parts)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"part{part}", store),
        rank=own_rank,
        world_size=parts[part],
        timeout=timeout,
    )
    if len(parts) > 1 and (part > 0 or rank == 0):
        own_rank, size = max(0, rank - parts[0] + 1), 1 + sum(parts[1:])
        _weights_group = _group_across(backend, store, own_rank, size, timeout)


def _group_across(
    backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a group of ranks of several worlds; `src` in it is a rank of this group."""
    make: Any = distributed_c10d._new_process_group_helper
    # Without a list of ranks HCCL treats the group as the default one. torch looks up the rank of
    # this process within its part in the list, which has it: the list has all numbers up to the
    # number of ranks in the other parts.
    ranks = list(range(size))
    pool = dist.PrefixStore("pool", store)
    group, _ = make(size, rank, ranks, backend, pool, group_name="pool", timeout=timeout)
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    return group


def timeout_minutes() -> int:
    """Return the timeout that `join` got, in minutes, rounded up; 30 before `join`."""
    return math.ceil(_timeout.total_seconds() / 60)


def set_timeout(groups: Iterable[dist.ProcessGroup]) -> None:
    """Set the timeout of gloo and NCCL groups to that of `timeout_minutes`.

    Megatron gives the groups for gradients of experts no timeout, and torch's default is half an
    hour. HCCL uses its variables (`npu.set_timeouts`). For a gloo group the timeout is set on its
    CPU backend: torch's own function would also look up the CUDA backend, for which torch_npu
    substitutes NPU, and gloo has none.
    """
    timeout = timedelta(minutes=timeout_minutes())
    for group in groups:
        kinds = {device.type for device in group._device_types}
        if "cpu" in kinds:
            group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
        elif "cuda" in kinds:
            distributed_c10d._set_pg_timeout(timeout, group)


def weights_group() -> dist.ProcessGroup | None:
    """Return the group of a disaggregated pool's first rank, its rank 0, and the other parts.

    None = this rank is not in it, or the pool is not split.
    """
    return _weights_group


def groups_of_layout(layout: Layout, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a copy of Megatron's globals with the groups of a layout, which its roles share.

    Calls `make` for the first role of a layout. The groups live until `leave`: if they ended with a
    role, ranks that drop a role at different times would disagree on the groups that exist, and the
    next collective that makes groups would hang.
    """
    if layout not in _groups:
        _groups[layout] = make()
    return dict(_groups[layout])


def leave() -> None:
    """Destroy all process groups of this process; does nothing without any."""
    global _weights_group
    _weights_group = None
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
