"""Measure whether the memory of a run's processes grows over hundreds of tiny iterations.

The resident memory of driver, workers and Ray's object store is read from /proc each time
metrics.jsonl has a new line. Prints one JSON line with the growth of each process after warm-up:
the slope of a least-squares line in kB per iteration. With --picture draws the memory of each
process (needs matplotlib). Ends with 1 when a slope is over the limit.

    python benchmarks/long_run.py [--iterations 500] [--warm-up 100] [--picture memory.png]
"""

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from iteration import ROOT, make_models, write_inputs

LIMIT_KB = 20.0  # per iteration and process
PROMPT, RESPONSE, BATCH = 16, 4, 8
SHAPE = {
    "num_layers": 1,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 2,
    "num_query_groups": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
ENDS_WITHIN_S = 120.0
POLL_S = 0.02


@dataclass
class Trace:
    """Resident memory of one process. iterations: counted from 1; kb: memory at each"""

    iterations: list[int] = field(default_factory=list)
    kb: list[float] = field(default_factory=list)

    def add(self, iteration: int, kb: float) -> None:
        self.iterations.append(iteration)
        self.kb.append(kb)

    def slope(self, warm_up: int) -> float:
        """Return the growth in kB per iteration after the first `warm_up` iterations.

        0 with fewer than two measurements.
        """
        points = [(i, kb) for i, kb in zip(self.iterations, self.kb, strict=True) if i > warm_up]
        if len(points) < 2:
            return 0.0
        x, y = np.array(points).T
        return float(np.polyfit(x, y, 1)[0])


def main() -> int:
    """Train, print the result, and return the exit code: 1 where memory grows, else 0."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the run is ended as well
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--runtime", choices=["ray", "local"], default="ray")
    parser.add_argument("--save-interval", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="stop the run by then")
    parser.add_argument("--picture", type=Path, help="draw the memory to this file")
    parser.add_argument("--numbers", type=Path, help="write all measurements to this JSON file")
    arguments = parser.parse_args()
    if arguments.picture and importlib.util.find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib; install it or leave the picture out")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder, SHAPE)
        write_inputs(folder)
        command = write_config(folder, arguments)
        started = time.monotonic()
        traces = watch(command, folder / "run", arguments.limit_s)
        wall_s = time.monotonic() - started
    slopes = {name: trace.slope(arguments.warm_up) for name, trace in sorted(traces.items())}
    print(json.dumps(summary(arguments, traces, slopes, wall_s)))
    if arguments.numbers:
        numbers = {name: [t.iterations, t.kb] for name, t in traces.items()}
        arguments.numbers.write_text(json.dumps(numbers), encoding="utf-8")
    if arguments.picture:
        draw(arguments.picture, traces, slopes, arguments.warm_up)
    return int(max(slopes.values()) > LIMIT_KB)


def summary(
    arguments: Any, traces: dict[str, Trace], slopes: dict[str, float], wall_s: float
) -> dict[str, Any]:
    """Return the figures to print. slopes: by process, kB per iteration"""
    return {
        "benchmark": "long_run",
        "runtime": arguments.runtime,
        "devices": arguments.devices,
        "iterations": traces["driver"].iterations[-1] - arguments.warm_up,
        "warm_up": arguments.warm_up,
        "wall_s": round(wall_s),
        "kb_per_iteration": {name: round(slope, 2) for name, slope in slopes.items()},
        "last_mb": {name: round(trace.kb[-1] / 1024, 1) for name, trace in sorted(traces.items())},
        "limit_kb": LIMIT_KB,
        "holds": max(slopes.values()) <= LIMIT_KB,
    }


def write_config(folder: Path, arguments: Any) -> list[str]:
    """Write the configuration of the run; return the command that trains."""
    scorer = {"micro_batch_size": BATCH, "load": str(folder / "scorer")}
    policy = {"micro_batch_size": BATCH, "load": str(folder / "policy")}
    tree = {
        "model": {"bench": SHAPE},
        "training": {
            "model": "bench",
            "train_iters": arguments.iterations + arguments.warm_up,
            "global_batch_size": BATCH,
            "seq_length": PROMPT + RESPONSE,
            "tokenizer_name_or_path": str(folder / "tokenizer"),
            "output_dir": str(folder / "run"),
            "save_interval": arguments.save_interval,
        },
        "actor_rollout": {
            **policy,
            "do_sample": True,
            "max_prompt_length": PROMPT,
            "ppo_mini_batch_size": BATCH,
        },
        "ref": policy,
        "critic": {**scorer, "critic_mini_batch_size": BATCH},
        "reward": {**scorer, "kind": "model"},
        "data": {"train_files": str(folder / "train.jsonl")},
        "device": {"kind": "cpu"},
        "runtime": arguments.runtime,
        "placement": dict.fromkeys(("actor_rollout", "ref", "critic", "reward"), "main"),
        "resource_pool": {"main": arguments.devices},
    }
    (folder / "bench.yaml").write_text(json.dumps(tree), encoding="utf-8")
    script = str(ROOT / "ray_gpt.py")
    return [sys.executable, script, "--config-dir", str(folder), "--config-name", "bench"]


def watch(command: list[str], run: Path, limit_s: float) -> dict[str, Trace]:
    """Run a command, and measure its processes' memory after each iteration, by process name.

    run:     the run's output folder
    limit_s: the command is stopped then
    Ends the benchmark with an error if the command fails or no iteration ends in time.
    """
    traces: dict[str, Trace] = {}
    names: dict[int, str] = {}
    seen, offset, ends = 0, 0, time.monotonic() + limit_s
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        while process.poll() is None and time.monotonic() < ends:
            metrics = run / "metrics.jsonl"
            if metrics.exists():
                with open(metrics, "rb") as stream:
                    stream.seek(offset)
                    new = stream.read()
                end = new.rfind(b"\n") + 1
                offset += end
                if end:
                    seen += new.count(b"\n")
                    measure(process.pid, seen, names, traces)
            time.sleep(POLL_S)
    finally:
        stopped = process.poll() is None
        if stopped:
            process.terminate()
        process.wait(ENDS_WITHIN_S)
    if process.returncode and not stopped:
        raise SystemExit(f"error: the run must end with 0, it ended with {process.returncode}")
    if "driver" not in traces:
        raise SystemExit(f"error: the first iteration must end within --limit-s={limit_s:g}")
    return traces


def measure(root: int, iteration: int, names: dict[int, str], traces: dict[str, Trace]) -> None:
    """Add the present memory of each process of the run to its trace.

    root:   process id of the run's command
    names:  process id -> name; gets an entry for each new process
    traces: by name
    """
    first = psutil.Process(root)
    for process in [first, *first.children(recursive=True)]:
        try:
            if process.pid not in names:
                names[process.pid] = name_of(process, root, names.values())
            memory = process.memory_info()
        except psutil.NoSuchProcess:
            continue
        name = names[process.pid]
        if name:
            traces.setdefault(name, Trace()).add(iteration, memory.rss / 1024)
        if name == "object store and raylet":
            traces.setdefault("object store", Trace()).add(iteration, memory.shared / 1024)


def name_of(process: psutil.Process, root: int, taken: Sequence[str] | Any) -> str:
    """Name a process of the run; "" for one that is not measured.

    root:  process id of the run's command
    taken: names given so far, by which workers are numbered
    """
    command = process.cmdline()
    title = " ".join(command)
    if "ray_gpt.py" in title:  # the driver, and the supervisor if there is one
        supervises = process.pid == root and any(
            "ray_gpt.py" in " ".join(child.cmdline()) for child in process.children()
        )
        return "supervisor" if supervises else "driver"
    if command and Path(command[0]).name == "raylet":
        return "object store and raylet"
    if title.startswith("ray::RayWorker"):
        return f"worker {sum(name.startswith('worker') for name in taken)}"
    return ""


def draw(file: Path, traces: dict[str, Trace], slopes: dict[str, float], warm_up: int) -> None:
    """Draw the growth of each process since the end of the warm-up to `file`."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, trace in sorted(traces.items()):
        after = [kb for i, kb in zip(trace.iterations, trace.kb, strict=True) if i > warm_up]
        base = after[0] if after else trace.kb[-1]
        grown = [(kb - base) / 1024 for kb in trace.kb]
        axes.plot(trace.iterations, grown, label=f"{name}: {slopes[name]:+.1f} kB per iteration")
    axes.axvline(warm_up, color="grey", linestyle=":")
    last = max(trace.iterations[-1] for trace in traces.values())
    axes.plot([warm_up, last], [0, (last - warm_up) * LIMIT_KB / 1024], "k--", label="limit")
    axes.set_xlabel("iteration")
    axes.set_ylabel("resident memory since warm-up, MB")
    axes.set_ylim(bottom=-5)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
