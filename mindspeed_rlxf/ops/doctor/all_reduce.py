"""The part of one rank in a test all-reduce; each rank is a process of its own."""

from datetime import timedelta

import torch
import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind

ELEMENTS = 2**20  # fp32, 4 MiB
REPEATS = 4


def arrival_key(rank: int) -> str:
    """Return the key that a rank sets in the store of its group when it comes."""
    return f"here/{rank}"


def all_reduce(
    kind: DeviceKind, ip: str, port: int, rank: int, world_size: int, timeout_s: float
) -> str:
    """Join the process group, all-reduce `rank + 1` REPEATS times, and leave the group.

    ip, port:  of the group's TCPStore
    timeout_s: longest wait for the other ranks, in each step
    Returns "" if the sums are right, else the cause of the failure.
    """
    try:
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(ip, port, is_master=False, timeout=timeout)
        store.set(arrival_key(rank), "")
        place = device.select_first_device(kind)
        dist.init_process_group(
            device.facts(kind).backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        wanted = world_size * (world_size + 1) // 2  # 1 + 2 + ... + world_size
        elements = torch.empty(ELEMENTS, device=place)
        for _ in range(REPEATS):
            elements.fill_(rank + 1)
            dist.all_reduce(elements)
            if not bool((elements == wanted).all()):
                raise ValueError(
                    f"the sum is wrong: {elements.min():g} to {elements.max():g}, not {wanted}"
                )
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
