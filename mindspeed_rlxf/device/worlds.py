"""A process's torch.distributed world, and the group connecting a disaggregated pool's worlds.

Each sub-pool of a disaggregated pool forms a world with ranks counted from 0; Megatron sees only
these. One more group sends weights from the first sub-pool to the others: it has the pool's first
rank and all ranks in the other sub-pools. torch makes groups only inside a world, so this one is
made by the function `init_process_group` calls.
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

Layout = tuple[Any, ...]  # of Megatron: tensor, pipeline and expert parallel size

_weights_group: dist.ProcessGroup | None = None
_groups: dict[Layout, dict[str, Any]] = {}  # groups by name; Megatron's are its globals
_timeout = timedelta(minutes=30)  # torch's default, until a world is joined


def open_store(
    ip: str, world_size: int | None = None, timeout: timedelta = timedelta(minutes=5)
) -> tuple[dist.TCPStore, int]:
    """Start a rendezvous store on a free port at `ip`; return it and the port without waiting.

    The port is bound before the store is made, so no other process can take it in between. Raises
    OSError if this host cannot listen on `ip`. `timeout` is the longest wait for a store key.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    listener.bind((ip, 0))
    listener.listen(world_size or 1024)
    port = int(listener.getsockname()[1])

    options: dict[str, Any] = {
        "is_master": True,
        "timeout": timeout,
        "wait_for_workers": False,
        "master_listen_fd": listener.fileno(),
    }
    try:
        store = dist.TCPStore(ip, port, world_size, **options)
    except NotImplementedError:  # with libuv, torch 2.7 takes no socket that is open
        store = dist.TCPStore(ip, port, world_size, use_libuv=False, **options)
    listener.detach()
    return store, port


def subpool_rank(rank: int, subpool_sizes: Sequence[int]) -> tuple[int, int]:
    """Return (sub-pool index, rank in the sub-pool) of a pool rank: 6 of (4, 4) is (1, 2)."""
    for subpool, end in enumerate(accumulate(subpool_sizes)):
        if rank < end:
            return subpool, rank - (end - subpool_sizes[subpool])
    raise AssertionError(f"rank {rank} is beyond the sub-pools {tuple(subpool_sizes)}")


def join(
    backend: str,
    store: dist.Store,
    rank: int,
    subpool_sizes: Sequence[int],
    timeout: timedelta,
) -> None:
    """Initialize torch.distributed with this rank's sub-pool as the world.

    In a pool with several sub-pools, also create `weights_group`. With gloo it blocks until every
    member has called it; NCCL and HCCL connect at the first collective.

    Args:
        backend: torch.distributed backend.
        store: Rendezvous store shared by the pool.
        rank: Rank within the pool.
        subpool_sizes: Ranks of each sub-pool, in rank order; one entry is the whole pool.
        timeout: For these groups; `timeout_minutes` returns it for later groups.
    """
    global _weights_group, _timeout
    _timeout = timeout
    subpool, rank_in_subpool = subpool_rank(rank, subpool_sizes)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"subpool{subpool}", store),
        rank=rank_in_subpool,
        world_size=subpool_sizes[subpool],
        timeout=timeout,
    )
    if len(subpool_sizes) > 1 and (subpool > 0 or rank == 0):
        group_rank = max(0, rank - subpool_sizes[0] + 1)
        size = 1 + sum(subpool_sizes[1:])
        _weights_group = _group_across(backend, store, group_rank, size, timeout)


def _group_across(
    backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a group spanning several worlds; `src` in it is a rank within this group."""
    make: Any = distributed_c10d._new_process_group_helper
    # Without a list of ranks HCCL treats the group as the default one. torch looks up the rank of
    # this process within its sub-pool in the list, which has it: the list has all numbers up to the
    # number of ranks in the other sub-pools.
    ranks = list(range(size))
    pool = dist.PrefixStore("pool", store)
    group, _ = make(size, rank, ranks, backend, pool, group_name="pool", timeout=timeout)
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    return group


def timeout_minutes() -> int:
    """Return `join`'s timeout in minutes, rounded up; 30 before `join`."""
    return math.ceil(_timeout.total_seconds() / 60)


def set_timeout(groups: Iterable[dist.ProcessGroup]) -> None:
    """Set gloo and NCCL group timeouts to `timeout_minutes`.

    Megatron gives expert gradient groups no timeout, and torch's default is half an hour. HCCL uses
    its variables (`npu.set_timeouts`). A gloo group's timeout is set on its CPU backend: torch's
    own function would also look up the CUDA backend, replaced by NPU's under torch_npu, and gloo
    has none.
    """
    timeout = timedelta(minutes=timeout_minutes())
    for group in groups:
        kinds = {device.type for device in group._device_types}
        if "cpu" in kinds:
            group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
        elif "cuda" in kinds:
            distributed_c10d._set_pg_timeout(timeout, group)


def weights_group() -> dist.ProcessGroup | None:
    """Return the group with a disaggregated pool's first rank (rank 0) and the other sub-pools.

    None = this rank is not in it, or the pool is not split.
    """
    return _weights_group


def groups_of_layout(layout: Layout, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a copy of a layout's groups (Megatron's globals), shared by its roles.

    Calls `make` for a layout's first role. The groups live until `leave`: if they ended with a
    role, ranks dropping a role at different times would disagree on the existing groups, and the
    next collective group creation would hang.
    """
    if layout not in _groups:
        _groups[layout] = make()
    return dict(_groups[layout])


def leave() -> None:
    """Destroy all process groups in this process, if any."""
    global _weights_group
    _weights_group = None
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
