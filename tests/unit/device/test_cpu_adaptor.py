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


def test_parts_of_any_size_are_gathered_scattered_and_exchanged(forks, tmp_path):
    forks.run("tests.unit.device.adaptor_program", "collectives", tmp_path / "store")


@pytest.mark.parametrize("interface", ["", "lo"])
def test_groups_share_one_thread_for_sockets_and_keep_their_own_timeout(forks, tmp_path, interface):
    words = "tests.unit.device.adaptor_program", "groups", tmp_path / "store"
    forks.run(*words, GLOO_SOCKET_IFNAME=interface)
