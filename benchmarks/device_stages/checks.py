"""Stages that compare with recorded numbers, or one run with another."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

from .settings import GIB, QUICK, ROOT, Figures, Settings

REAL_MODEL = Path("outputs/smollm2/model")  # as `bring_up.py` looks for it


def environment(settings: Settings) -> Figures:
    """Return the device's name and memory, and the versions of what computes on it."""
    import torch

    from mindspeed_rlxf import __version__, device
    from mindspeed_rlxf.config.enums import DeviceKind
    from mindspeed_rlxf.config.packages import version

    where = device.setup(DeviceKind(settings.device), settings.threads, megatron=False)
    torch.ones(8, device=where).sum().item()  # the device computes
    packages = ("transformers", "megatron-core", "mindspeed", "torch_npu", "flash-attn", "triton")
    versions = {name: version(name) for name in packages}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": settings.device,
        "name": device.device_name() or platform.processor() or platform.machine(),
        "memory_gib": round(device.memory_total() / GIB, 1),
        "mindspeed_rlxf": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: number for name, number in versions.items() if number},
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": settings.threads,
        "is_quick": settings.sizes == QUICK,
    }


def bring_up(settings: Settings, stages: str) -> Figures:
    """Run stages of `examples/tiny/bring_up.py`; return what it prints of each."""
    script = ROOT / "examples" / "tiny" / "bring_up.py"
    command = [sys.executable, str(script), "--device", settings.device, "--processes", "1"]
    results: dict[str, str] = {}
    with subprocess.Popen([*command, "--stages", stages], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None, "it is a pipe"
        for line in run.stdout:
            print(line, end="", flush=True)
            if not line.startswith(" "):  # else details of a failure
                name, _, result = line.partition(" ")
                results[name] = result.strip()
    if run.returncode:
        return {"stages": results, "error": f"exit code {run.returncode}: {results}"}
    return {"stages": results}


def bring_up_tiny(settings: Settings) -> Figures:
    """Run the stages with tiny models."""
    return bring_up(settings, settings.sizes.bring_up[0])


def bring_up_real(settings: Settings) -> Figures:
    """Run the stages with a real language model, if there is one."""
    if not REAL_MODEL.exists():
        return {"skipped": f"no {REAL_MODEL}"}
    return bring_up(settings, settings.sizes.bring_up[1])


def resume(settings: Settings) -> Figures:
    """Compare a run that was killed and resumed with an uninterrupted one, bit by bit."""
    import hashlib
    import multiprocessing

    from mindspeed_rlxf.checkpoint.directory import RunDirectory
    from tests.chaos.same_run import differences, lines_of, state_of

    iterations = settings.sizes.resume_iterations
    whole, cut = (RunDirectory(settings.scratch / name) for name in ("whole", "cut"))
    context = multiprocessing.get_context(settings.start)

    def train(directory: RunDirectory, killed_in: int = 0) -> int | None:
        process = context.Process(target=train_tiny, args=(settings, directory.path, killed_in))
        process.start()
        process.join()
        return process.exitcode

    killed_in = iterations // 2 + 1
    codes = [train(whole), train(cut, killed_in), train(cut)]
    if codes != [0, -9, 0]:
        return {"error": f"the exit codes of the runs are {codes}, not [0, -9, 0]"}
    unequal = differences(whole, cut, iterations)
    compared = state_of(cut, iterations), lines_of(cut.metrics)
    figures: Figures = {
        "iterations": iterations,
        "killed_in": killed_in,
        "digest": hashlib.sha256(json.dumps(compared).encode()).hexdigest()[:16],
        "is_equal": not unequal,
    }
    if unequal:
        figures["error"] = "the resumed run differs: " + "; ".join(unequal)
    return figures


def train_tiny(settings: Settings, folder: Path, killed_in: int) -> None:
    """Train the tiny model by GRPO with offload, or resume it, and end this process.

    killed_in: iteration in which this process kills itself, before anything of it is written
    """
    from mindspeed_rlxf.trainer.ppo import Iteration, PpoTrainer
    from mindspeed_rlxf.trainer.preflight import prepare
    from mindspeed_rlxf.trainer.run import run
    from tests.golden.runs import golden_config

    iterations = settings.sizes.resume_iterations
    keys = {
        "device.kind": settings.device,
        "device.cpu_threads": settings.threads,
        "runtime.kind": "local",
        "training.train_iters": iterations,
        "training.save_interval": max(1, iterations // 5),
        "training.deterministic": True,
        "actor_rollout.offload.weights": True,
        "actor_rollout.offload.optimizer": True,
        "ref.offload.weights": True,
        "logging.samples": "all",  # of the ledger's check
    }
    finish = PpoTrainer._run_hooks

    def finish_or_die(trainer: PpoTrainer, finished: Iteration) -> None:
        if trainer.iteration == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(trainer, finished)

    PpoTrainer._run_hooks = finish_or_die  # type: ignore[method-assign]
    config = golden_config("grpo", folder, keys)
    sys.exit(run(config, prepare(config)))
