"""The cluster checks of `doctor`, with real processes as hosts or on Ray nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.cluster.host_agent import call_each
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.ops.doctor.all_reduce import warm_up
from mindspeed_rlxf.ops.doctor.collectives import check_collectives
from mindspeed_rlxf.ops.doctor.findings import Status
from mindspeed_rlxf.ops.doctor.hunt import Party

REPOSITORY = Path(__file__).resolve().parents[3]
NUM_RANKS = 3


@pytest.fixture(scope="module")
def ranks(ray_runtime: Any) -> Iterator[Any]:
    """Three processes of the warm cluster, which stand for three hosts."""
    from mindspeed_rlxf.cluster.ray.agent import RayAgent, device_options, live_nodes
    from mindspeed_rlxf.ops.doctor.ranks import RayRanks

    (node,) = live_nodes("rlxf_cpu")
    options = device_options(None, {})
    processes = [RayAgent(node.id, node.host, **options) for _ in range(NUM_RANKS)]
    found = RayRanks(DeviceKind.CPU, processes, [node.ip] * NUM_RANKS)
    try:
        assert len(set(call_each(processes, warm_up, timeout_s=120.0))) == NUM_RANKS
        yield found
    finally:
        found.end()


def hosts() -> list[Party]:
    return [Party(f"host-{i}", (i,)) for i in range(NUM_RANKS)]


def test_real_processes_pass_and_a_killed_one_is_named(ranks: Any) -> None:
    found = check_collectives(hosts(), ranks, 120.0)
    assert [f for f in found if f.status is not Status.OK] == []
    assert found[-1].value.startswith("3 of 3 hosts together")
    pid = ranks.processes[1].call(warm_up, timeout_s=60.0)
    os.kill(pid, signal.SIGKILL)  # its place is taken by a new process after it was found
    started = time.monotonic()
    found = check_collectives(hosts(), ranks, 120.0)
    bad = [f for f in found if f.status is Status.ERROR]
    assert [f.value.partition(" (")[0] for f in bad] == ["all-reduce fails inside host-1"]
    assert time.monotonic() - started < 120
    assert found[-1].value.startswith("2 of 2 hosts together")


def test_a_process_that_hangs_does_not_hold_up_the_others(ranks: Any) -> None:
    ranks.processes[2].start(time.sleep, 1000, timeout_s=2000.0)
    first, second, third = ranks.run([(0,), (1,), (2,)], 20.0)
    assert first.passed and second.passed
    assert not third.passed and third.absent == (2,)


@pytest.mark.long
def test_the_command_on_a_cluster_of_three_nodes(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1, resources={"rlxf_cpu": 2}, object_store_memory=10**8)
        arguments = ["doctor", "--cluster", "--json", "--device", "cpu", "--deadline", "200"]
        code = f"import sys; from mindspeed_rlxf.cli import main; sys.exit(main({arguments!r}))"
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        environment["PYTHONPATH"] = str(REPOSITORY)
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    finally:
        cluster.shutdown()
    assert done.stderr == ""
    report = json.loads(done.stdout)
    values = {f["check"]: f["value"] for f in report["findings"]}
    assert [f for f in report["findings"] if f["status"] == "error"] == []
    assert done.returncode == 0
    assert values["cluster.hosts"] == "3 of 3 hosts answered"
    assert values["cluster.versions"] == "the same on 3 hosts"
    assert values["collectives.all"].startswith("3 of 3 hosts together")
