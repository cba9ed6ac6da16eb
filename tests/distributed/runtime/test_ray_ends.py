"""Nothing of an own cluster outlives its driver; a joined cluster outlives it unharmed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.runtime.group_checks import build
from tests.distributed.runtime.stand_ins import StandIn

REPOSITORY = Path(__file__).resolve().parents[3]


@contextmanager
def driver(mode: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A driver whose workers are busy, and what it found out before."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.runtime.ray_driver", mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the driver ended early: {process.communicate()[1]}"
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_of_an_own_cluster_is_left_after(number: signal.Signals) -> None:
    with driver("own", RAY_ADDRESS="") as (process, facts):
        assert facts["own"] and facts["left_after_normal_end"] == []
        assert not Path(facts["first_temp_dir"]).exists()
        children = psutil.Process(process.pid).children(recursive=True)
        assert facts["worker"] in [child.pid for child in children]
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
        assert not Path(facts["temp_dir"]).exists()
    if number is signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")


def test_a_joined_cluster_is_left_as_it_was(ray_runtime: Any) -> None:
    address = ray_runtime.cluster.address
    with driver("join", RAY_ADDRESS=address, NCCL_RLXF_TEST="on") as (process, facts):
        assert not facts["own"] and facts["forwarded"] == "on"
        worker = psutil.Process(facts["worker"])
        assert worker not in psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        worker.wait(timeout=20)
    pool = ray_runtime.create_pools({"after": [1]})["after"]
    assert build(pool).call(StandIn.rank).result() == [(0, 1)]
    pool.shutdown()
