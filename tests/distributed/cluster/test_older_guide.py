"""The three commands of MindSpeed-LLM's guide run as they are typed, with CPU stand-ins."""

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.golden.runs import PPO, SMALL

REPOSITORY = Path(__file__).resolve().parents[3]
HEAD = """ray start --head --port 6344 --dashboard-host=0.0.0.0 --dashboard-port=8260
          --resources '{"NPU": 8}'"""
SECOND = """ray start --address=HEAD:6344 --resources '{"NPU": 8}'"""
TRAIN = "python ray_gpt.py --config-name ppo_trainer_tiny"
CHANGES = {
    **SMALL, **PPO, "training.train_iters": 1, "resource_pool.main": "[1,1]",
    "device.resource_name": "NPU",
}  # fmt: skip


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Of a user without tokens; at the end of the test nothing of their Ray is left."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="d") as home:  # sockets: a short path
        own = {name: v for name, v in os.environ.items() if not name.startswith("RAY_")}
        yield {**own, "HOME": home, "RAY_TMPDIR": home, "PYTHONPATH": str(REPOSITORY)}
        left = [p for p in psutil.process_iter(["environ"]) if of_home(p, home)]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=10)


def of_home(process: psutil.Process, home: str) -> bool:
    return (process.info["environ"] or {}).get("RAY_TMPDIR") == home


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.mark.long
def test_the_commands_of_the_older_guide_train(environment: dict[str, str], tmp_path: Path) -> None:
    port, ray = free_port(), [sys.executable, "-m", "ray.scripts.scripts"]
    more = [f"{key}={value}" for key, value in CHANGES.items()]
    more.append(f"training.output_dir={tmp_path / 'run'}")
    # The ports of the guide may be in use here; the second host is this one.
    head = HEAD.replace("6344", port).replace("8260", free_port())
    second = SECOND.replace("HEAD:6344", f"127.0.0.1:{port}")
    for line, program, extra in (
        (head, ray, ["--num-cpus=1"]),
        (second, ray, ["--num-cpus=1"]),
        (TRAIN, [sys.executable], more),
    ):
        words = [*program, *shlex.split(line)[1:], *extra]
        done = subprocess.run(
            words, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "joined the Ray cluster" in done.stdout
    assert "done: 1 iterations" in done.stdout
