"""What the CPU adaptor patches, tested in processes of their own, as it cannot be undone."""

import json
from typing import Any

import pytest

from tests.processes import only_line, run_python

PROBE = """
import json
import sys
import torch
from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind

where = device.setup(DeviceKind.CPU, threads=1)
again = device.setup(DeviceKind.CPU, threads=2)
threads = torch.get_num_threads()
try:
    device.setup(DeviceKind.CUDA)
    other = "taken"
except AssertionError as error:
    other = str(error)

torch.cuda.manual_seed(3)
state = torch.cuda.get_rng_state()
first = torch.rand(2, device="cuda").tolist()
torch.cuda.set_rng_state(state)
second = torch.rand(2, device="cuda").tolist()

with torch.device("meta"):
    within = [str(t.device) for t in (torch.tensor([1.0]), torch.arange(3), torch.ones(1))]

print(json.dumps({
    "within": within,
    "where": [str(where), str(again), str(device.current_device())],
    "threads": threads,
    "other": other,
    "made": [str(t.device) for t in (
        torch.zeros(2, device="cuda"),
        torch.arange(3, device=torch.device("cuda", 1)),
        torch.empty_like(torch.ones(1), device="cuda:0"),
        torch.ones(1).to("cuda"),
        torch.ones(1).to(device=torch.device("cuda"), dtype=torch.float64),
        torch.ones(1).cuda(),
        torch.nn.Linear(1, 1).cuda().weight,
    )],
    "current": str(torch.cuda.current_device()),
    "type": torch.ones(1).type(),
    "cast": torch.ones(1).type(torch.bfloat16).dtype is torch.bfloat16,
    "random": first == second,
    "event": torch.cuda.Stream().record_event().synchronize(),
    "idle": device.synchronize(),
    "compiler": [__import__("megatron.core") and name in sys.modules
                 for name in ("torch._dynamo", "torch._inductor")],
}))
"""
FACTS: dict[str, Any] = {
    "made": ["cpu"] * 7,
    "current": "cpu",
    "type": "torch.cuda.FloatTensor",  # the distributed optimizer compares the prefix
    "cast": True,
    "random": True,  # the device's random state is the CPU's
    "where": ["cpu", "cpu", "cpu"],
    "threads": 2,  # of the second setup
    "other": "device already set up as cpu, not cuda",
    "event": None,  # there is nothing to wait for
    "idle": None,
    "within": ["meta"] * 3,  # transformers makes models there, and asks a tensor where it is
    "compiler": [False, False],  # three of the four seconds of Megatron's import
}


def test_cuda_is_the_cpu():
    assert json.loads(only_line("{", run_python("-c", PROBE))) == FACTS


COLLECTIVES = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mindspeed_rlxf.device import cpu_adaptor

def check(rank, store):
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
    dist.all_to_all_single(
        out, rows, output_split_sizes=torch.tensor(receive), input_split_sizes=torch.tensor(send)
    )
    assert out.flatten().tolist() == ([0.0, 10.0, 11.0, 12.0] if rank == 0 else [1.0, 2.0]), out
    dist.barrier()
    dist.destroy_process_group()

mp.start_processes(check, (sys.argv[1],), nprocs=2, start_method="fork")
"""


def test_parts_of_any_size_are_gathered_scattered_and_exchanged(tmp_path):
    run_python("-c", COLLECTIVES, tmp_path / "store", timeout_s=120)


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
def test_groups_share_one_thread_for_sockets_and_keep_their_own_timeout(tmp_path, interface):
    run_python("-c", GROUPS, tmp_path / "store", timeout_s=120, GLOO_SOCKET_IFNAME=interface)
