"""A script of `examples/mcore` for one host, run for real on a stand-in of its model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.chaos.tiny_run import ROOT, settings

PORT = "6399"  # not the script's own, which may be a user's, nor one of the workers', from 10000 on


@pytest.mark.long
def test_script_trains_and_leaves_no_ray_behind(tmp_path: Path) -> None:
    script = ROOT / "examples" / "mcore" / "llama32" / "ray_ppo_llama32_1b_1node.sh"
    variables = {
        "CONFIG_NAME": "ppo_trainer_tiny",
        "DEVICE": "cpu",
        "DEVICES_PER_NODE": "1",
        "MASTER_PORT": PORT,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", str(script), *settings(tmp_path / "run", devices=1), "training.train_iters=2"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"joined the Ray cluster at 127.0.0.1:{PORT} (RAY_ADDRESS=" in done.stdout + done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if f":{PORT}" in " ".join(p.info["cmdline"] or [])
    ]
    assert left == []
