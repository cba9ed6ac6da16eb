"""What the CPU adaptor patches, tested in a process of its own, as it cannot be undone."""

import json
import subprocess
import sys
from typing import Any

import pytest

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


Seen = dict[str, Any]


@pytest.fixture(scope="module")
def seen() -> Seen:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


FACTS = {
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


@pytest.mark.parametrize("fact", FACTS)
def test_cuda_is_the_cpu(seen: Seen, fact: str) -> None:
    assert seen[fact] == FACTS[fact]
