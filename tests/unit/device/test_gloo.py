"""gloo takes parts of different sizes, and its groups share one device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COLLECTIVES = """
import sys
import torch
import torch.distributed as dist
from mindspeed_rlxf.device import cpu_adaptor

rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
cpu_adaptor.wrap_collectives()

def gathered(sizes):
    parts = [torch.full((size, 2), -1.0) for size in sizes]
    dist.all_gather(parts, torch.full((sizes[rank], 2), float(rank)), group=dist.group.WORLD)
    return [part[:, 0].tolist() for part in parts]

def scattered(sizes):
    parts = [torch.arange(size).float() + 10 * (rank + 1) for size in sizes]
    mine = torch.empty(sizes[rank])
    dist.reduce_scatter(mine, parts, group=dist.group.WORLD)
    return mine.tolist()

for sizes in ((2, 2), (1, 3), (0, 2)):
    assert gathered(sizes) == [[0.0] * sizes[0], [1.0] * sizes[1]], sizes
    # element i of a part is 10 + i on one rank and 20 + i on the other
    assert scattered(sizes) == [30.0 + 2 * i for i in range(sizes[rank])], sizes

# rank 0 sends 1 row to itself and 2 to rank 1; rank 1 sends 3 and 0
send, receive = ([1, 2], [1, 3]) if rank == 0 else ([3, 0], [2, 0])
rows = torch.arange(3.0)[:, None] + 10 * rank
out = torch.empty(sum(receive), 1)
dist.all_to_all_single(
    out, rows, output_split_sizes=torch.tensor(receive), input_split_sizes=torch.tensor(send)
)
assert out.flatten().tolist() == ([0.0, 10.0, 11.0, 12.0] if rank == 0 else [1.0, 2.0]), out
dist.barrier()
dist.destroy_process_group()
"""


def test_parts_of_any_size_are_gathered_scattered_and_exchanged(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", COLLECTIVES, str(rank), store], stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors.decode()
    finally:
        for process in ranks:
            process.kill()


GROUPS = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from mindspeed_rlxf.device import cpu_adaptor

cpu_adaptor.share_device()
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
before = len(os.listdir("/proc/self/task"))
groups = [dist.new_group([0], timeout=timedelta(seconds=77)) for _ in range(5)]
made = len(os.listdir("/proc/self/task")) - before
assert made == 2 * 5, made  # two that work for each group, and none for its sockets
options = groups[-1]._get_backend(torch.device("cpu")).options
assert options._timeout == timedelta(seconds=77)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("interface", ["", "lo"])
def test_groups_share_one_thread_for_sockets_and_keep_their_own_timeout(
    tmp_path: Path, interface: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROUPS, str(tmp_path / "store")],
        env={**os.environ, "GLOO_SOCKET_IFNAME": interface},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
