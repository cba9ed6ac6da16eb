"""Run `ray_gpt.py` with `runtime: local` on a CPU and on a simulated NPU, and compare the runs."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.golden.runs import SETTINGS, SMALL
from tests.npu_sim import ray_run, run
from tests.npu_sim.processes import environment
from tests.processes import ROOT

ITERATIONS = 3
STOPPED = 75  # exit status of a run that was stopped and can resume
TIMEOUT_S = 600


def command(name: str, out: Path, kind: str, changes: Mapping[str, Any]) -> list[str]:
    """Return the command of a golden run with ITERATIONS iterations. kind: cpu or sim"""
    base, settings = SETTINGS[name]
    # The critic has a tenth of its rate: the length of Adam's first steps does not depend on the
    # gradient's size, so rounding errors moved a weight by 1.6e-5 with the usual rate.
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
    """Return the environment of a run. kind: cpu or sim; more: further variables of sim"""
    if kind == "cpu":
        return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return environment(scratch, 1, RLXF_SIM_DELAYED="1", **more)


def finish(
    name: str, scratch: Path, kind: str, changes: Mapping[str, Any], stopped: bool = False
) -> Path:
    """Run to the end; return the run directory.

    stopped: stop the run by SIGTERM after its first iteration, and resume it
    """
    out, log = scratch / f"{kind} run", scratch / f"{kind}.log"
    line, where = command(name, out, kind, changes), variables(kind, scratch)
    codes = []
    if stopped:
        codes.append(ray_run.run_command(line, where, log, out / "metrics.jsonl") - STOPPED)
    codes.append(ray_run.run_command(line, where, log))
    assert not any(codes), f"{codes}\n{log.read_text()[-6000:]}"
    return out


def largest_difference(name: str, scratch: Path, changes: Mapping[str, Any], **more: Any) -> float:
    """Run on CPU and on the simulated NPU; return the largest difference of metrics and weights.

    Fails the test where the samples differ. more: keyword arguments of `finish` on the NPU
    """
    ours = finish(name, scratch, "cpu", changes)
    theirs = finish(name, scratch, "sim", changes, **more)
    assert ray_run.read_samples(ours) == ray_run.read_samples(theirs)
    return max(by for _, by in run.result_differences(ours, theirs))


def convert(source: Path, target: Path, scratch: Path, *more: str) -> None:
    """Run `convert_ckpt.py` from Hugging Face to Megatron's layout where torch_npu is installed."""
    done = subprocess.run(
        [sys.executable, "convert_ckpt.py", "--load-model-type", "hf", "--save-model-type", "mg",
         "--load-dir", str(source), "--save-dir", str(target), *more],
        cwd=ROOT, env=variables("sim", scratch), capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
