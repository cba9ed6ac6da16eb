"""Two hosts, started as users start them: `ray start` on each, `python ray_gpt.py` once.

One cluster serves all tests, in their order.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts.hosts import Host, make_hosts, wait_for, why_not

START = Path(__file__).resolve().parents[1] / "golden" / "start"
RUN_S = 400.0


@dataclass
class Lab:
    head: Host
    worker: Host
    shared: Path

    def log(self, name: str) -> Path:
        return self.shared / f"{name}.log"

    def train(self, name: str, **changes: str) -> list[str]:
        """The command; both pools span both hosts. Models stand in the folder of each host."""
        model = self.head.data / "model"
        settings = {
            "training.output_dir": self.shared / name,
            "training.train_iters": 2,
            "training.global_batch_size": 8,
            "training.model": "auto",
            "training.load": model,
            "training.tokenizer_name_or_path": model,
            "actor_rollout.ppo_mini_batch_size": 4,
            "actor_rollout.micro_batch_size": 2,
            "critic.critic_mini_batch_size": 4,
            "critic.micro_batch_size": 2,
            "actor_rollout.load": model,
            "ref.load": model,
            "critic.load": model,
            "data.train_files": self.head.data / "model" / "prompts.jsonl",
            "data.val_files": "[]",
            "validation.interval": 0,
            "placement.critic": "judge",
            "resource_pool": "{main: [1, 1], judge: [1, 1], wait_s: 120}",
            "device.kind": "cpu",
            **changes,
        }
        pairs = [f"{key}={value}" for key, value in settings.items()]
        command = [sys.executable, "ray_gpt.py", "--config-name", "ppo_trainer_tiny"]
        return [
            *command,
            "~resource_pool",
            *(f"+{p}" if p.startswith("resource_pool=") else p for p in pairs),
        ]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A head with Ray running, and a worker that has not joined yet."""
    lacking = why_not()
    if lacking:
        pytest.fail(lacking)
    with make_hosts(2) as (hosts, shared):
        for host in hosts:
            shutil.copytree(START, host.own / "model")
        (hosts[1].own / "model" / "prompts.jsonl").unlink()  # prompts are the driver's to read
        found = Lab(*hosts, shared)
        found.head.start_ray(found.log("ray"), devices=2)
        yield found


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").open()]


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
    found = metrics(lab.shared / "late")
    assert len(found) == 2 and all(line["actor/grad_norm"] > 0 for line in found)
    for part in ("actor_hf", "actor_megatron", "critic_hf", "critic_megatron"):
        assert any((lab.shared / "late" / "final" / part).iterdir())
    assert "is not shared with" not in text


def test_a_host_without_the_files_is_named_before_devices_are_claimed(lab: Lab) -> None:
    (lab.worker.own / "model" / "model.safetensors").rename(lab.worker.own / "kept")
    log = lab.log("missing")
    try:
        code = lab.head.start(lab.train("missing"), log).wait(timeout=RUN_S)
    finally:
        (lab.worker.own / "kept").rename(lab.worker.own / "model" / "model.safetensors")
    text = log.read_text()
    assert code == 2, text
    assert "must be the same on every node; on node2: model.safetensors (missing there" in text
    assert "pool main:" not in text and "waiting for devices" not in text
    assert not (lab.shared / "missing" / "config.yaml").exists()  # the next run may take it


def test_a_run_directory_of_each_host_is_said_to_be_apart(lab: Lab) -> None:
    """Its files are whole on the host that wrote them."""
    folder = lab.head.data / "apart"
    changes = {"training.output_dir": str(folder), "training.train_iters": "1"}
    log = lab.log("apart")
    code = lab.head.start(lab.train("apart", **changes), log).wait(timeout=RUN_S)
    text = log.read_text()
    assert code == 0, text
    assert "training.output_dir is not shared with node2: logs of their ranks" in text
    assert len(metrics(lab.head.own / "apart")) == 1
    assert (lab.head.own / "apart" / "logs" / "main" / "rank_00000.log").exists()
    assert (lab.worker.own / "apart" / "logs" / "main" / "rank_00001.log").exists()
    assert not (lab.worker.own / "apart" / "metrics.jsonl").exists()
