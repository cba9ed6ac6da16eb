"""Compare two runs: weights, optimizers, random streams, metrics, samples and consumed prompts."""

import json
from pathlib import Path
from typing import Any

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.checkpoint.store import Checkpoint

# Prefixes of metrics that depend on the machine and its load, not on the training.
MACHINE_METRICS = ("timing/", "throughput/", "memory/", "idle/", "skew/", "slowest_rank/")


def state_of(directory: RunDirectory, iteration: int) -> dict[str, str]:
    """Return path -> sha256 of each file of the roles in a checkpoint: weights, optimizers and
    random streams, but not the trainer's own state."""
    files = Checkpoint(directory.checkpoints / f"iter_{iteration:07d}", iteration).read().files
    return {
        entry["path"]: entry["sha256"] for entry in files if not entry["path"].startswith("trainer")
    }


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, without times and MACHINE_METRICS."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line.pop("time_s", None)
        metrics = line.get("metrics", {})
        for name in [name for name in metrics if name.startswith(MACHINE_METRICS)]:
            del metrics[name]
    return lines


def differences(one: RunDirectory, other: RunDirectory, iterations: int) -> list[str]:
    """Return what differs between two finished runs of `iterations` iterations; [] = nothing."""
    found = []
    if state_of(one, iterations) != state_of(other, iterations):
        found.append("weights, optimizers or random streams of the last checkpoint")
    for name in ("metrics", "samples", "consumed"):
        ours, theirs = (lines_of(getattr(run, name)) for run in (one, other))
        if ours != theirs:
            found.append(f"{name}: {len(ours)} and {len(theirs)} lines")
    if [line["iteration"] for line in lines_of(other.metrics)] != [*range(1, iterations + 1)]:
        found.append("iterations that are missing or repeated in the metrics")
    taken = [line["first_sample_id"] for line in lines_of(other.consumed)]
    size = len(lines_of(other.samples)) // iterations
    if taken != list(range(0, size * iterations, size)):
        found.append("prompts that are missing or repeated in the ledger")
    return found
