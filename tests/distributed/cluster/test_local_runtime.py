"""The local runtime passes the checks of role groups, alone and under torchrun."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


def torchrun() -> list[str]:
    """Two ranks over numeric loopback addresses: no name server is asked for anything."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--local-addr", "127.0.0.1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return ["-m", "torch.distributed.run", "--nproc-per-node", "2", *place]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_local_runtime_passes_the_group_checks(ranks: int) -> None:
    launcher = torchrun() if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "tests.distributed.cluster.local_driver"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("passed") == ranks
