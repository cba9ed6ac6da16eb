"""The cluster checks of `doctor`, on real processes of Ray nodes."""

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.processes import with_sources


def own_pid() -> int:
    return os.getpid()


def hang() -> None:
    time.sleep(1000)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("two\nlines")


def test_tasks_that_die_fail_or_hang_do_not_hold_up_the_others(ray_runtime: Any) -> None:
    from mindspeed_rlxf.cluster.ray.node_tools import Failed, Task, live_nodes, run_tasks

    (node,) = live_nodes("rlxf_cpu")
    tasks = [Task(node.id, function) for function in (own_pid, die, fail)]
    pid, *others = run_tasks(tasks, {"GLOO_X": "1"}, 60.0)
    assert pid not in (os.getpid(), *others)
    assert all(isinstance(reply, Failed) for reply in others)
    assert run_tasks([Task(node.id, hang)], {}, 1.0) == [Failed("no reply within 1 s")]


@pytest.mark.long
def test_the_command_on_a_cluster_of_three_nodes(tmp_path):
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1, resources={"rlxf_cpu": 2}, object_store_memory=10**8)
        arguments = ["doctor", "--cluster", "--json", "--device", "cpu"]
        code = f"import sys; from mindspeed_rlxf.cli import main; sys.exit(main({arguments!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path, env=with_sources(RAY_ADDRESS=cluster.address), capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip
    finally:
        cluster.shutdown()
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    values = {f["check"]: f["value"] for f in report["findings"]}
    assert [f for f in report["findings"] if f["status"] == "error"] == []
    assert done.returncode == 0
    assert values["cluster.hosts"] == "3 of 3 hosts answered"
    assert values["cluster.versions"] == "the same on 3 hosts"
    assert values["collectives.all"].startswith("6 ranks on 3 of 3 hosts together")
