"""Groups share one gloo device; in a process of its own, which has no other groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROBE = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from mindspeed_rlxf.device import gloo_device

for _ in range(2):  # as in a process that is set up again
    gloo_device.apply()
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
before = len(os.listdir("/proc/self/task"))
groups = [dist.new_group([0], timeout=timedelta(seconds=77)) for _ in range(5)]
made = len(os.listdir("/proc/self/task")) - before
assert made == 2 * 5, made  # two that work for each group, and none for its sockets
options = groups[-1]._get_backend(torch.device("cpu")).options
assert options._timeout == timedelta(seconds=77)
dist.destroy_process_group()
"""


def test_groups_share_one_thread_for_sockets_and_keep_their_own_timeout(tmp_path: Path) -> None:
    for interface in ("", "lo"):
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface}
        done = subprocess.run(
            [sys.executable, "-c", PROBE, str(tmp_path / f"store{interface}")],
            env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
