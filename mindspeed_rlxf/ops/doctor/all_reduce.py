"""The part of one rank in a test all-reduce; each rank is a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import worlds

ELEMENTS = 2**20  # fp32, 4 MiB
REPEATS = 4


@dataclass(frozen=True)
class Rank:
    """One rank of a group.

    ip, port:  of the group's TCPStore
    timeout_s: longest wait for the other ranks, in each step
    """

    kind: DeviceKind
    ip: str
    port: int
    rank: int
    world_size: int
    timeout_s: float


class Meeting:
    """The TCPStore of one group, in the process that starts its ranks."""

    def __init__(self, ip: str, world_size: int) -> None:
        self._world_size = world_size
        self._store, self.port = worlds.open_store(ip)

    def absent(self) -> list[int]:
        """Return the ranks that have not come."""
        return [rank for rank in range(self._world_size) if not self._store.check([_key(rank)])]


def all_reduce(rank: Rank) -> str:
    """Join the process group, all-reduce `rank + 1` REPEATS times, and leave the group.

    Returns "" if the sums are right, else the cause of the failure.
    """
    try:
        timeout = timedelta(seconds=rank.timeout_s)
        store = dist.TCPStore(rank.ip, rank.port, is_master=False, timeout=timeout)
        store.set(_key(rank.rank), "")
        place = device.select_first_device(rank.kind)
        dist.init_process_group(
            device.backend(rank.kind),
            store=dist.PrefixStore("group", store),
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timeout,
        )
        wanted = rank.world_size * (rank.world_size + 1) // 2  # 1 + 2 + ... + world_size
        elements = torch.empty(ELEMENTS, device=place)
        for _ in range(REPEATS):
            elements.fill_(rank.rank + 1)
            dist.all_reduce(elements)
            if not bool((elements == wanted).all()):
                found = f"{elements.min():g} to {elements.max():g}"
                raise ValueError(f"the sum is wrong: {found}, not {wanted}")
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _key(rank: int) -> str:
    return f"here/{rank}"
