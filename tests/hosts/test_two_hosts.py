"""Two hosts, started as users start them: `ray start` on each, `python ray_gpt.py` once.

One cluster serves all tests, in their order. The first test adds the second host: whoever selects
some tests must select it too.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.tiny_run import START, settings
from tests.hosts.hosts import Host, find_obstacle, make_hosts
from tests.processes import only_line, read_lines, read_metrics, wait_for

RUN_S = 400.0


@dataclass
class Lab:
    head: Host
    worker: Host
    shared: Path

    def log(self, name: str) -> Path:
        return self.shared / f"{name}.log"

    def run(self, name: str, code: int = 0, **changes: str) -> str:
        """Output of a run on the head that ends with this exit code."""
        return self.head.run(self.train(name, **changes), self.log(name), RUN_S, code)

    def train(self, name: str, **changes: str) -> list[str]:
        """The command; both pools span both hosts. Each host has the models in its own folder."""
        usual = settings(self.shared / name, 1, self.head.data / "model")
        keys = {
            **dict(each.split("=", 1) for each in usual if not each.startswith("resource_pool")),
            "training.train_iters": 2,
            "placement.critic": "judge",
            "+resource_pool": "{main: [1, 1], judge: [1, 1], wait_s: 120}",
            "device.kind": "cpu",
            **changes,
        }
        command = [sys.executable, "ray_gpt.py", "--config-name", "ppo_trainer_tiny"]
        return [*command, "~resource_pool", *(f"{key}={value}" for key, value in keys.items())]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A head with Ray running, and a worker that has not joined yet."""
    lacking = find_obstacle()
    if lacking:
        pytest.fail(lacking)
    with make_hosts(2) as (hosts, shared):
        for host in hosts:
            shutil.copytree(START, host.own / "model")
        (hosts[1].own / "model" / "prompts.jsonl").unlink()  # prompts are the driver's to read
        found = Lab(*hosts, shared)
        found.head.start_ray(found.log("ray"), devices=2)
        yield found


def test_a_run_waits_for_a_host_and_trains_on_both(lab: Lab) -> None:
    log = lab.log("late")
    run = lab.head.start(lab.train("late"), log, GLOO_LOG_LEVEL="INFO")
    wait_for("ray: waiting for devices: resource_pool.main needs rlxf_cpu: [1, 1]", log, run, 120)
    lab.worker.start_ray(lab.log("ray"), devices=2, head=lab.head)
    assert run.wait(timeout=RUN_S) == 0, log.read_text()
    text = log.read_text()
    assert f"ray: joined the Ray cluster at {lab.head.ip}:6344 (`ray start` of this user" in text
    assert "node1 (10.77.0.1): 2 of 2 free" in text
    for pool in ("main", "judge"):
        assert f"pool {pool}: rank 0 on node1 (10.77.0.1), rank 1 on node2 (10.77.0.2)" in text
    found = read_metrics(lab.shared / "late")
    assert len(found) == 2 and all(line["actor/grad_norm"] > 0 for line in found)
    for part in ("actor_hf", "actor_megatron", "critic_hf", "critic_megatron"):
        assert any((lab.shared / "late" / "final" / part).iterdir())
    assert "is not shared with" not in text


def test_a_host_without_the_files_is_named_before_devices_are_claimed(lab: Lab) -> None:
    (lab.worker.own / "model" / "model.safetensors").rename(lab.worker.own / "kept")
    try:
        text = lab.run("missing", 2)
    finally:
        (lab.worker.own / "kept").rename(lab.worker.own / "model" / "model.safetensors")
    assert "must be the same on every node; on node2: model.safetensors (missing there" in text
    assert "pool main:" not in text and "waiting for devices" not in text
    assert not (lab.shared / "missing" / "config.yaml").exists()  # the next run may take it


def test_a_run_directory_that_the_nodes_do_not_share_is_refused(lab: Lab) -> None:
    text = lab.run("apart", 2, **{"training.output_dir": str(lab.head.data / "apart")})
    assert "training.output_dir must be on storage that all nodes share, node2 did not see" in text


def test_a_worker_that_died_on_another_host_is_named(lab: Lab) -> None:
    log = lab.log("killed")
    changes = {"training.train_iters": "1000", "training.max_restarts": "0"}
    run = lab.head.start(lab.train("killed", **changes), log)
    wait_for("iteration: 2 /", log, run, RUN_S)
    lab.worker.run(["pkill", "-KILL", "-f", "RayWorker"], lab.log("pkill"))
    assert run.wait(timeout=120) == 1, log.read_text()
    line = only_line("failed: ", log.read_text())
    assert "rank 1" in line and "on node2" in line and "the process died" in line
    found = json.loads((lab.shared / "killed" / "failure.json").read_text())
    assert (found["host"], found["rank"]) == ("node2", 1)
    assert (lab.shared / "killed" / "logs" / "main" / "rank_00001.log").exists()


def test_a_run_goes_on_without_a_host_that_was_lost(lab: Lab) -> None:
    """It waits for another one, then the same command with half of the processes goes on.

    The last test with both hosts.
    """
    log = lab.log("lost")
    changes = {
        "training.train_iters": "60", "training.save_interval": "1", "training.node_wait_s": "5",
        "placement.critic": "main", "+resource_pool": "{main: [1, 1], wait_s: 120}",
    }  # fmt: skip
    run = lab.head.start(lab.train("lost", **changes), log)
    wait_for("iteration: 2 /", log, run, RUN_S)
    lab.worker.run(["pkill", "-KILL", "raylet"], lab.log("pkill"))
    assert run.wait(timeout=RUN_S) == 75, log.read_text()
    text = log.read_text()
    for said in ("failed: ", "restart: ", "stopped: waited 5 s"):
        assert said in text, text
    lab.run("lost", **{**changes, "+resource_pool": "{main: [1], wait_s: 120}"})
    lines = read_lines(lab.shared / "lost" / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(1, 61)), "each once"


def test_two_runs_beside_each_other_under_a_head_without_devices(lab: Lab) -> None:
    for host in (lab.worker, lab.head):
        host.stop_ray(lab.log("ray"))
    lab.head.start_ray(lab.log("ray"), devices=0)
    lab.worker.start_ray(lab.log("ray"), devices=2, head=lab.head)
    changes = {"placement.critic": "main", "+resource_pool": "{main: [1], wait_s: 60}"}
    first, second = lab.log("first"), lab.log("second")
    one = lab.head.start(lab.train("first", **changes, **{"training.train_iters": "9000"}), first)
    wait_for("iteration: 1 /", first, one, RUN_S)
    lab.run("second", **changes)
    assert one.poll() is None, first.read_text()
    folder = f"output_dir={lab.shared / 'first'}"
    lab.head.run(["pkill", "-TERM", "--oldest", "-f", folder], lab.log("pkill"))
    assert one.wait(timeout=120) == 75, first.read_text()
    for log in (first, second):
        assert "pool main: rank 0 on node2 (10.77.0.2)" in log.read_text()
