from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["one process", "torchrun"])
def test_the_local_runtime_passes_the_group_checks(launcher: list[str]) -> None:
    command = [sys.executable, *launcher, "-m", "tests.distributed.runtime.local_driver"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("passed") == (2 if launcher else 1)
