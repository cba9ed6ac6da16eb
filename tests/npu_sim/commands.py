"""The command `ray_gpt.py` with `runtime: local`, on a CPU and on a simulated NPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.golden.runs import SETTINGS, SMALL
from tests.npu_rehearsal import ray_run, run
from tests.npu_sim.processes import environment
from tests.processes import ROOT

ITERATIONS = 3
STOPPED = 75  # exit status
TIMEOUT_S = 600


def command(name: str, out: Path, kind: str, changes: Mapping[str, Any]) -> list[str]:
    """Of a golden run, for a few iterations. kind: cpu, or sim"""
    base, settings = SETTINGS[name]
    # A tenth of the critic's rate: Adam's first steps are as long where a gradient is rounding
    # alone, and with the usual one a weight was 1.6e-5 apart.
    rate = {"critic.lr": 1e-4} if base.startswith("ppo") else {}
    keys = {
        **SMALL,
        **settings,
        **rate,
        "training.train_iters": ITERATIONS,
        "training.output_dir": out,
        "device.kind": "cpu" if kind == "cpu" else "npu",
        "runtime.kind": "local",
        **changes,
    }
    start = [sys.executable, "ray_gpt.py", "--config-name", base]
    return [*start, *(f"{key}={value}" for key, value in keys.items())]


def variables(kind: str, scratch: Path, **more: str) -> dict[str, str]:
    if kind == "cpu":
        return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return environment(scratch, 1, RLXF_SIM_DELAYED="1", **more)


def finish(
    name: str, scratch: Path, kind: str, changes: Mapping[str, Any], stopped: bool = False
) -> Path:
    """The run directory of the finished run. stopped: by SIGTERM on the way; then it goes on."""
    out, log = scratch / f"{kind} run", scratch / f"{kind}.log"
    line, where = command(name, out, kind, changes), variables(kind, scratch)
    codes = []
    if stopped:
        codes.append(ray_run.give(line, where, log, out / "metrics.jsonl") - STOPPED)
    codes.append(ray_run.give(line, where, log))
    assert not any(codes), f"{codes}\n{log.read_text()[-6000:]}"
    return out


def largest_difference(name: str, scratch: Path, changes: Mapping[str, Any], **more: Any) -> float:
    """Between metrics and final weights of both; samples have to be the same words."""
    ours = finish(name, scratch, "cpu", changes)
    theirs = finish(name, scratch, "sim", changes, **more)
    assert ray_run.texts(ours) == ray_run.texts(theirs)
    return max(by for _, by in run.result_differences(ours, theirs))


def convert(source: Path, target: Path, scratch: Path, *more: str) -> None:
    """`convert_ckpt.py` from a Hugging Face folder to Megatron's layout, beside the device."""
    done = subprocess.run(
        [sys.executable, "convert_ckpt.py", "--load-model-type", "hf", "--save-model-type", "mg",
         "--load-dir", str(source), "--save-dir", str(target), *more],
        cwd=ROOT, env=variables("sim", scratch), capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
