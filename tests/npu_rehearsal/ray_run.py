"""PPO as users start it on NPUs, `ray start` and `ray_gpt.py`, beside the same command on CPU.

    RLXF_MINDSPEED=... RLXF_MEGATRON_LM=... python -m tests.npu_rehearsal.ray_run [case ...]

`run` compares more, without Ray. Here everything is the command's own: Ray hands out the NPUs, the
driver counts them by `npu-smi`, each worker sets up its device and MindSpeed by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.chaos.tiny_run import settings
from tests.npu_rehearsal import run
from tests.unit.device.npu_recorder import smi_table

ITERATIONS = 5
DEVICES = 2
TIMEOUT_S = 600
START_S = 60
OPERATORS = ("npu_fusion_attention", "npu_rms_norm", "npu_swiglu", "optimizer")
TP2 = [f"{r}.tensor_model_parallel_size=2" for r in ("actor_rollout", "ref", "critic")]
PP2 = [f"{r}.pipeline_model_parallel_size=2" for r in ("actor_rollout", "ref", "critic")]
NOSET = {"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"}
# What is added to the command and to the environment, and the devices as the workers see them.
HIDDEN = ["device 0 of 0", "device 0 of 1"]
CASES: dict[str, tuple[list[str], dict[str, str], list[str]]] = {
    "dp2": ([], {}, HIDDEN),
    "tp2": (TP2, {}, HIDDEN),
    "pp2": (PP2, {}, HIDDEN),
    "all devices visible": ([], NOSET, ["device 0 of all", "device 1 of all"]),
}


def train(scratch: Path, name: str, kind: str) -> Path:
    """The run directory of the finished run. Raises RuntimeError with what the command said."""
    more, variables, _ = CASES[name]
    out, log = scratch / f"{kind} run", scratch / f"{kind}.log"
    environment = {**run.environment(kind, scratch), **variables}
    command = [sys.executable, "ray_gpt.py", "--config-name", "ppo_trainer_tiny"]
    command += [*settings(out, DEVICES), f"training.train_iters={ITERATIONS}", *more]
    command += [f"device.kind={kind}", "training.max_restarts=0"]
    with contextlib.ExitStack() as ends:
        address = "local"
        if kind == "npu":
            environment |= stand_ins(scratch)
            address = ends.enter_context(cluster(scratch, environment))
            # Its kernels are imported by workers alone; torch would take them for its own here.
            paths = environment["PYTHONPATH"].split(os.pathsep)
            kept = [path for path in paths if path != str(run.STANDIN / "kernels")]
            environment["PYTHONPATH"] = os.pathsep.join(kept)
        with log.open("wb") as file:
            done = subprocess.run(
                [*command, f"runtime.address={address}"], cwd=run.REPOSITORY, env=environment,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=TIMEOUT_S,
            )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{kind} {name}: exit {done.returncode}\n{log.read_text()[-6000:]}")
    return out


def stand_ins(scratch: Path) -> dict[str, str]:
    """The driver's tool, and a folder for what the workers tell."""
    tool, told = scratch / "bin" / "npu-smi", scratch / "told"
    tool.parent.mkdir(exist_ok=True)
    told.mkdir(exist_ok=True)
    tool.write_text(f"#!/bin/sh\ncat <<'TABLE'\n{smi_table(DEVICES)}TABLE\n")
    tool.chmod(0o755)
    return {
        "PATH": f"{tool.parent}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "RLXF_STANDIN_TOLD": str(told),
        "RLXF_STANDIN_DEVICES": str(DEVICES),
    }


@contextlib.contextmanager
def cluster(scratch: Path, environment: dict[str, str]) -> Iterator[str]:
    """`ray start` with NPUs, in a process that ends here. Gives the address."""
    port, log = run.free_port(), scratch / "ray.log"
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        "--node-ip-address=127.0.0.1", f"--port={port}", f'--resources={{"NPU": {DEVICES}}}',
        "--num-cpus=2", "--include-dashboard=false", "--object-store-memory=100000000",
        f"--temp-dir={scratch / 'r'}", "--disable-usage-stats",
    ]  # fmt: skip
    with log.open("wb") as file:
        ray = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            if ray.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"ray start failed:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        ray.terminate()
        try:
            ray.wait(timeout=30)
        except subprocess.TimeoutExpired:
            ray.kill()
            ray.wait()


def differences(ours: Path, theirs: Path) -> list[tuple[str, float]]:
    """Largest relative difference of each metric and weight; samples have to be the same."""
    found = []
    lines = [
        [json.loads(line) for line in (out / "metrics.jsonl").open()] for out in (ours, theirs)
    ]
    assert len(lines[0]) == len(lines[1]) == ITERATIONS
    for one, other in zip(*lines, strict=True):
        for name, value in one["metrics"].items():
            if not name.startswith(run.SKIPPED) and "memory" not in name:
                what = f"iteration {one['iteration']} {name}"
                found.append((what, run.distance([value], [other["metrics"][name]])))
    for role in ("actor", "critic"):
        tensors = [run.load(out / "final" / f"{role}_hf") for out in (ours, theirs)]
        for name, tensor in tensors[0].items():
            pair = [t.flatten().tolist() for t in (tensor, tensors[1][name])]
            found.append((f"{role} {name}", run.distance(*pair)))
    samples = [texts(out) for out in (ours, theirs)]
    if samples[0] != samples[1]:
        found.append(("samples differ", float("inf")))
    return found


def texts(out: Path) -> list[Any]:
    lines = [json.loads(line) for line in (out / "samples.jsonl").open()]
    return [(line["iteration"], line["prompt"], line["response"]) for line in lines]


def told(folder: Path) -> dict[str, list[str]]:
    """What each process of the run told: its device, and the operators that it called."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        pid, _, what = path.name.partition(" ")
        found.setdefault(pid, []).append(what)
    return found


def rehearse(name: str, scratch: Path) -> bool:
    """Whether both runs agree, on the devices and through the operators of the case."""
    found = differences(train(scratch, name, "cpu"), train(scratch, name, "npu"))
    worst = max(found, key=lambda each: each[1])
    workers = [what for what in told(scratch / "told").values() if len(what) > 1]
    devices = sorted(what for each in workers for what in each if what.startswith("device"))
    print(f"{name}: {len(found)} things, largest difference {worst[1]:.1e} ({worst[0]}); {devices}")
    lacking = [
        f"a worker never called {operator}"
        for worker in workers
        for operator in OPERATORS
        if operator not in worker
    ]
    if devices != CASES[name][2]:
        lacking.append(f"devices must be {CASES[name][2]}")
    print("".join(f"  {what}\n" for what in lacking), end="", flush=True)
    return worst[1] <= run.TOLERANCE and not lacking


def main(names: list[str]) -> int:
    if run.missing():
        print(f"error: {', '.join(run.missing())} must name a folder; see the head of {__file__}")
        return 2
    failed = []
    for name in names or CASES:
        # Ray's sockets below it may have 107 characters in their path.
        with tempfile.TemporaryDirectory(prefix="rlxf", dir="/var/tmp") as scratch:
            try:
                if not rehearse(name, Path(scratch)):
                    failed.append(name)
            except RuntimeError as error:
                print(error, flush=True)
                failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
