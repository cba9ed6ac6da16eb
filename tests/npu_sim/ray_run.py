"""Run PPO as users start it on NPUs, by `ray start` and `ray_gpt.py`, and compare it with CPU.

    RLXF_MINDSPEED=... RLXF_MEGATRON_LM=... python -m tests.npu_sim.ray_run [case ...]

`run` compares more numbers, without Ray. Here the command does everything itself: Ray assigns the
NPUs, the driver counts them by `npu-smi`, and each worker sets up its device and MindSpeed.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.tiny_run import START, settings
from tests.npu_sim import processes, run
from tests.npu_sim.cases import operators_of
from tests.processes import free_port, read_lines, start_logged, wait_for
from tests.unit.device.npu_recorder import smi_table

ROLES = ("actor_rollout", "ref", "critic")
NOSET = {"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"}
REWARD = "REWARD"  # in settings: replaced by the folder of a reward model that is made for the run


@dataclass(frozen=True)
class Case:
    settings: tuple[str, ...] = ()  # further overrides
    variables: dict[str, str] = field(default_factory=dict)  # environment
    pools: tuple[int, ...] = (2,)  # number of devices of each pool, all on one host
    devices: tuple[str, ...] = ("device 0 of 0", "device 0 of 1")  # "device INDEX of VISIBLE"
    uncalled: tuple[str, ...] = ()  # operators that some workers do not call
    stopped: bool = False  # the NPU run gets SIGTERM in its second iteration, then resumes


def for_each_role(setting: str) -> tuple[str, ...]:
    return tuple(f"{role}.{setting}" for role in ROLES)


CASES = {
    "dp2": Case(),
    "tp2": Case(for_each_role("tensor_model_parallel_size=2")),
    "pp2": Case(for_each_role("pipeline_model_parallel_size=2")),
    "all devices visible": Case(
        variables=NOSET, devices=("device 0 of all", "device 1 of all")
    ),
    # Actor and reference on two devices, critic and reward model on a third. The critic has a tenth
    # of the usual rate: the length of Adam's first steps does not depend on the gradient's size, so
    # a gradient of rounding errors moves a weight as far (9.6e-6 was seen with a reward model).
    "reward model": Case(
        (
            "reward.kind=model", "reward.model=auto", f"reward.load={REWARD}",
            "reward.micro_batch_size=2", "+resource_pool.scores=1", "placement.critic=scores",
            "placement.reward=scores", "critic.lr=1e-4",
        ),
        pools=(2, 1),
        devices=("device 0 of 0", "device 0 of 1", "device 0 of 2"),
    ),
    "split": Case(  # one device trains, another generates
        ("actor_rollout.num_gpus_for_train=1", "actor_rollout.num_gpus_for_infer=1",
         "+resource_pool.others=1", "placement.ref=others", "placement.critic=others",
         "placement.reward=others"),
        pools=(2, 1),
        devices=("device 0 of 0", "device 0 of 1", "device 0 of 2"),
        uncalled=("optimizer",),
    ),
    "stopped": Case(devices=("device 0 of 0",) * 2 + ("device 0 of 1",) * 2, stopped=True),
}  # fmt: skip

ITERATIONS = 5
TIMEOUT_S = 600
START_S = 60
STOPPED = 75  # exit status of a run that was stopped and can resume
OPERATORS = ("npu_fusion_attention", "npu_rms_norm", "npu_swiglu", "optimizer")
MAKE_REWARD = """
import sys, torch
from transformers import LlamaConfig, LlamaForSequenceClassification
torch.manual_seed(2)
config = LlamaConfig.from_pretrained(sys.argv[1], num_labels=1)
LlamaForSequenceClassification(config).save_pretrained(sys.argv[2])
"""


def train(scratch: Path, name: str, kind: str) -> Path:
    """Run a case to its end, with a Ray cluster unless on CPU; return its run directory."""
    case = CASES[name]
    out, log = scratch / f"{kind} run", scratch / f"{kind}.log"
    environment = {**run.environment(kind, scratch), **case.variables}
    more = [text.replace(REWARD, str(scratch / "reward")) for text in case.settings]
    command = [sys.executable, "ray_gpt.py", "--config-name", "ppo_trainer_tiny"]
    command += [*settings(out, case.pools[0]), f"training.train_iters={ITERATIONS}", *more]
    command += [f"device.kind={'cpu' if kind == 'cpu' else 'npu'}", "training.max_restarts=0"]
    with contextlib.ExitStack() as ends:
        address = "local"
        if kind != "cpu":
            environment |= install_tools(scratch, sum(case.pools))
            # A token of its own: Ray would take one of this user, which the workers do not have.
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            address = ends.enter_context(cluster(scratch, environment, sum(case.pools)))
            # Only workers import the replacement of triton: the driver's torch would try to use it.
            paths = environment["PYTHONPATH"].split(os.pathsep)
            kept = [path for path in paths if path != str(processes.KERNELS)]
            environment["PYTHONPATH"] = os.pathsep.join(kept)
        command.append(f"runtime.address={address}")
        codes = []
        if case.stopped and kind != "cpu":
            codes.append(run_command(command, environment, log, out / "metrics.jsonl") - STOPPED)
        codes.append(run_command(command, environment, log))
    if any(codes):
        raise RuntimeError(f"{kind} {name}: {codes}\n{log.read_text()[-6000:]}")
    return out


def run_command(
    command: list[str], environment: dict[str, str], log: Path, stop_at: Path | None = None
) -> int:
    """Run a command, and return its status. stop_at: file; send SIGTERM when it has a line."""
    deadline = time.monotonic() + TIMEOUT_S
    process = start_logged(command, log, environment)
    try:
        if stop_at is not None:
            while not (stop_at.exists() and stop_at.read_text().count("\n")):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"no iteration was done\n{log.read_text()[-6000:]}")
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
        return process.wait(max(deadline - time.monotonic(), 0))
    finally:
        process.kill()
        process.wait()


def install_tools(scratch: Path, devices: int) -> dict[str, str]:
    """Write an `npu-smi` and make a folder for the workers' records; return their variables."""
    tool, records = scratch / "bin" / "npu-smi", scratch / "records"
    tool.parent.mkdir(exist_ok=True)
    records.mkdir(exist_ok=True)
    tool.write_text(f"#!/bin/sh\ncat <<'TABLE'\n{smi_table(devices)}TABLE\n")
    tool.chmod(0o755)
    return {
        "PATH": f"{tool.parent}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "RLXF_SIM_RECORDS": str(records),
        "RLXF_SIM_DEVICES": str(devices),
    }


@contextlib.contextmanager
def cluster(scratch: Path, environment: dict[str, str], devices: int) -> Iterator[str]:
    """Start Ray with NPUs by `ray start`, yield its address, and end it after the block."""
    port, log = free_port(), scratch / "ray.log"
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        "--node-ip-address=127.0.0.1", f"--port={port}", f'--resources={{"NPU": {devices}}}',
        f"--num-cpus={devices}", "--include-dashboard=false", "--object-store-memory=100000000",
        f"--temp-dir={scratch / 'r'}", "--disable-usage-stats",
    ]  # fmt: skip
    ray = start_logged(command, log, environment)
    try:
        wait_for("Ray runtime started", log, ray, START_S)
        yield f"127.0.0.1:{port}"
    finally:
        ray.terminate()
        try:
            ray.wait(timeout=30)
        except subprocess.TimeoutExpired:
            ray.kill()
            ray.wait()


def differences(ours: Path, theirs: Path) -> list[tuple[str, float]]:
    """Return the differences of metrics and weights, infinite for samples that differ."""
    found = run.result_differences(ours, theirs)
    assert len(read_lines(ours / "metrics.jsonl")) == ITERATIONS
    samples = [read_samples(out) for out in (ours, theirs)]
    if samples[0] != samples[1]:
        found.append(("samples differ", float("inf")))
    return found


def read_samples(out: Path) -> list[Any]:
    lines = read_lines(out / "samples.jsonl")
    return [(line["iteration"], line["prompt"], line["response"]) for line in lines]


def read_records(folder: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        pid, _, what = path.name.partition(" ")
        found.setdefault(pid, []).append(what)
    return found


def rehearse(name: str, scratch: Path) -> bool:
    """Compare a case on CPU and on simulated NPUs, which its workers must use; print it."""
    if REWARD in " ".join(CASES[name].settings):
        command = [sys.executable, "-c", MAKE_REWARD, str(START), str(scratch / "reward")]
        subprocess.run(command, env=run.environment("cpu", scratch), check=True, timeout=TIMEOUT_S)
    ours, theirs = train(scratch, name, "cpu"), train(scratch, name, "sim")
    found = differences(ours, theirs)
    worst = max(found, key=lambda each: each[1])
    workers = [found for found in read_records(scratch / "records").values() if len(found) > 1]
    devices = sorted(what for each in workers for what in each if what.startswith("device"))
    print(f"{name}: {len(found)} values, largest difference {worst[1]:.1e} ({worst[0]}); {devices}")
    lacking = [
        f"a worker never called {operator}"
        for worker in workers
        for operator in operators_of(not run.missing(), OPERATORS)
        if operator not in (*worker, *CASES[name].uncalled)
    ]
    if devices != sorted(CASES[name].devices):
        lacking.append(f"devices must be {CASES[name].devices}")
    if CASES[name].stopped:
        lacking += find_unrestored_states(theirs, [what for worker in workers for what in worker])
    print("".join(f"  {what}\n" for what in lacking), end="", flush=True)
    return all(value <= run.TOLERANCE for _, value in found) and not lacking  # NaN is False


def find_unrestored_states(out: Path, records: list[str]) -> list[str]:
    """Return the device's random states in the first checkpoint that no worker has restored."""
    checkpoints = sorted((out / "checkpoints").glob("iter_*"))
    files = sorted(checkpoints[0].rglob("rank_*.json"))
    assert len(checkpoints) > 1 and files, "there must be the checkpoint of the stop and the last"
    print(f"  resumed from {checkpoints[0].name}")
    states = [bytes.fromhex(json.loads(f.read_text())["process"]["device"]) for f in files]
    sums = {f"random state {zlib.crc32(state):08x}" for state in states}
    return [f"{lost} was saved and not restored" for lost in sums - set(records)]


if __name__ == "__main__":
    # A short path, because those of Ray's sockets below it may have 107 characters at most.
    sys.exit(not run.rehearse_each(sys.argv[1:] or list(CASES), rehearse, "/var/tmp"))
