"""The scripts of `examples/mcore` that train, run for real on a stand-in of their model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.chaos.tiny_run import ROOT, settings

pytestmark = pytest.mark.long

PORT = "6399"  # not the script's own, which may be a user's, nor one of the workers', from 10000 on
SCRIPTS = sorted((ROOT / "examples" / "mcore").glob("*/ray_ppo_*.sh"))
ONE, MULTI = ([s for s in SCRIPTS if s.stem.endswith(kind)] for kind in ("_1node", "_multi_node"))
ENDS_S = 60.0


def start(script: Path, log: Path, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "CONFIG_NAME": "ppo_trainer_tiny",
        "DEVICE": "cpu",
        "DEVICES_PER_NODE": "1",
        "MASTER_PORT": PORT,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        **variables,
    }
    command = ["bash", str(script), *arguments]
    with open(log, "wb") as stream:
        return subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)


def two_iterations(folder: Path, *more: str) -> list[str]:
    return [*settings(folder / "run", devices=1), "training.train_iters=2", *more]


def num_lines(folder: Path) -> int:
    return (folder / "run" / "metrics.jsonl").read_text().count("\n")


def left_of_ray() -> list[str]:
    found = (" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))
    return [line for line in found if f":{PORT}" in line]


@pytest.mark.parametrize("script", ONE, ids=lambda script: script.stem)
def test_one_node_trains_and_leaves_no_ray_behind(tmp_path: Path, script: Path) -> None:
    run = start(script, tmp_path / "log", *two_iterations(tmp_path))
    code = run.wait(timeout=500)
    text = (tmp_path / "log").read_text()
    assert code == 0, text
    assert f"joined the Ray cluster at 127.0.0.1:{PORT} (RAY_ADDRESS=" in text
    assert num_lines(tmp_path) == 2
    assert left_of_ray() == []


@pytest.mark.parametrize("script", MULTI, ids=lambda script: script.stem)
def test_two_nodes_train_as_one_and_both_end(tmp_path: Path, script: Path) -> None:
    """Node 1 is started first, and waits; a device on each."""
    nodes = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "DASHBOARD_PORT": "8399"}
    pools = ("~resource_pool", "+resource_pool={main: [1, 1]}")
    arguments = [a for a in two_iterations(tmp_path, *pools) if "resource_pool.main" not in a]
    worker = start(script, tmp_path / "worker", NODE_RANK="1", **nodes)
    head = start(script, tmp_path / "head", *arguments, **nodes)
    try:
        code = head.wait(timeout=500)
        text = (tmp_path / "head").read_text()
        assert code == 0, text + (tmp_path / "worker").read_text()
        assert "pool main: ranks 0-1 on" in text and num_lines(tmp_path) == 2
        assert worker.wait(timeout=ENDS_S) == 0
    finally:
        for process in (head, worker):
            process.terminate()
            process.wait(timeout=ENDS_S)
    said = (tmp_path / "worker").read_text()
    assert f"waiting for Ray at 127.0.0.1:{PORT}" in said
    assert "node 0 has ended; its console tells how the run went" in said
    assert left_of_ray() == []
