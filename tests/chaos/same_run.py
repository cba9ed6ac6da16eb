"""What two runs have to agree in to be the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mindspeed_rlxf.run.directory import RunDirectory
from mindspeed_rlxf.run.store import Checkpoint

TIMES = ("timing/", "throughput/", "skew/", "slowest_rank/", "idle/", "memory/")
"""Metrics of the clock and of the process, which no two runs share."""


def state_of(directory: RunDirectory, iteration: int) -> dict[str, str]:
    """Hash of every file of tensors or streams of actor and critic in a checkpoint."""
    files = Checkpoint(directory.checkpoints / f"iter_{iteration:07d}", iteration).read().files
    return {
        entry["path"]: entry["sha256"] for entry in files if not entry["path"].startswith("trainer")
    }


def lines_of(file: Path) -> list[dict[str, Any]]:
    """What a file of lines says, times aside."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line.pop("time_s", None)
        metrics = line.get("metrics", {})
        for name in [name for name in metrics if name.startswith(TIMES)]:
            del metrics[name]
    return lines


def differences(one: RunDirectory, other: RunDirectory, iterations: int) -> list[str]:
    """What differs between two finished runs of as many iterations; nothing = they are the same."""
    found = []
    if state_of(one, iterations) != state_of(other, iterations):
        found.append("weights, optimizers or random streams of the last checkpoint")
    for name in ("metrics", "samples", "consumed"):
        ours, theirs = (lines_of(getattr(run, name)) for run in (one, other))
        if ours != theirs:
            found.append(f"{name}: {len(ours)} and {len(theirs)} lines")
    if [line["iteration"] for line in lines_of(other.metrics)] != [*range(1, iterations + 1)]:
        found.append("iterations that do not stand once each")
    taken = [line["first_sample_id"] for line in lines_of(other.consumed)]
    size = len(lines_of(other.samples)) // iterations
    if taken != list(range(0, size * iterations, size)):
        found.append("the ledger of prompts has a gap or a double")
    return found
