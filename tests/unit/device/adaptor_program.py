"""What `test_cpu_adaptor` does in processes of their own.

python -m tests.unit.device.adaptor_program NAME STORE
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mindspeed_rlxf.device import cpu_adaptor


def check_collectives(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    cpu_adaptor.wrap_collectives()
    for sizes in ((2, 2), (1, 3), (0, 2)):
        parts = [torch.full((size, 2), -1.0) for size in sizes]
        dist.all_gather(parts, torch.full((sizes[rank], 2), float(rank)), group=dist.group.WORLD)
        assert [p[:, 0].tolist() for p in parts] == [[0.0] * sizes[0], [1.0] * sizes[1]], sizes
        # element i of a part is 10 + i on one rank and 20 + i on the other
        parts = [torch.arange(size).float() + 10 * (rank + 1) for size in sizes]
        dist.reduce_scatter(mine := torch.empty(sizes[rank]), parts, group=dist.group.WORLD)
        assert mine.tolist() == [30.0 + 2 * i for i in range(sizes[rank])], sizes
    # rank 0 sends 1 row to itself and 2 to rank 1; rank 1 sends 3 and 0
    send, receive = ([1, 2], [1, 3]) if rank == 0 else ([3, 0], [2, 0])
    rows = torch.arange(3.0)[:, None] + 10 * rank
    out = torch.empty(sum(receive), 1)
    sizes_of_rows = {
        "output_split_sizes": torch.tensor(receive),
        "input_split_sizes": torch.tensor(send),
    }
    dist.all_to_all_single(out, rows, **sizes_of_rows)
    assert out.flatten().tolist() == ([0.0, 10.0, 11.0, 12.0] if rank == 0 else [1.0, 2.0]), out
    dist.barrier()
    dist.destroy_process_group()


def check_groups(store: str) -> None:
    cpu_adaptor.share_device()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    before = len(os.listdir("/proc/self/task"))
    groups = [dist.new_group([0], timeout=timedelta(seconds=77)) for _ in range(5)]
    made = len(os.listdir("/proc/self/task")) - before
    assert made == 2 * 5, made  # two that work for each group, and none for its sockets
    options = groups[-1]._get_backend(torch.device("cpu")).options
    assert options._timeout == timedelta(seconds=77)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "collectives":
        mp.start_processes(check_collectives, (sys.argv[2],), nprocs=2, start_method="fork")
    else:
        check_groups(sys.argv[2])
