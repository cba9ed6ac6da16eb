"""A conversion holds a few tensors at a time, however large the model is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.weights.folders_of import make_folder

# In its own process: prints the most anonymous memory above that of the imports, there and back.
MEASURE = """
import sys, threading, time
from mindspeed_rlxf.weights import conversion  # what a conversion imports
from mindspeed_rlxf.cli.convert import main
import torch
torch.set_num_threads(1)
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
before = peak = anonymous()
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch, daemon=True)
thread.start()
hf, mg, back, kind = sys.argv[1:]
assert main([hf, mg, "--to", "mg", "--format", kind]) == main([mg, back, "--to", "hf"]) == 0
done = True
thread.join()
print("PEAK", peak - before)
"""
# glibc raises this threshold as it goes, and what lies below it is kept after it was freed: by how
# much depends on the order in which threads free. Fixed, the numbers are what a conversion holds.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["torch_dist", "torch"])
def test_memory_is_that_of_few_tensors(tmp_path: Path, kind: str) -> None:
    """155 MiB in 81 tensors, the largest 8 MiB; one rank file and one shard hold all of it."""
    sizes = {"hidden_size": 1024, "ffn_hidden_size": 2048, "num_query_groups": 8}
    keys = {"kv_channels": 128, "num_layers": 8, "vocab_size": 4096}
    tensors = make_folder(tmp_path / "hf", "llama", shards=4, **sizes, **keys)
    total = sum(t.nbytes for t in tensors.values())
    largest = max(t.nbytes for t in tensors.values())
    folders = [str(tmp_path / name) for name in ("hf", "mg", "back")]
    command = [sys.executable, "-c", MEASURE, *folders, kind]
    environment = os.environ | ALLOCATOR
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("PEAK")[1]) < 5 * largest + (24 << 20) < total
