"""Gather the content of the page for each run, as values for JSON."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.printable import printable
from mindspeed_rlxf.reporting.report.answers import answer_all, wall_seconds
from mindspeed_rlxf.reporting.report.checks import check_ranges, list_checks, read_kl_limit
from mindspeed_rlxf.reporting.report.curves import describe_metrics, make_curves
from mindspeed_rlxf.reporting.report.illness import find_illnesses
from mindspeed_rlxf.reporting.report.records import (
    read_checkpoints,
    read_configs,
    read_failures,
    read_iterations,
    read_resumes,
)
from mindspeed_rlxf.reporting.report.samples import TokenSplitter
from mindspeed_rlxf.reporting.report.schedule import read_schedules

METHODS = {
    "ray_online_dpo": "Online DPO", "gae": "PPO", "grpo": "GRPO", "dr_grpo": "Dr. GRPO",
    "rloo": "RLOO", "reinforce_plus_plus": "REINFORCE++",
    "reinforce_plus_plus_baseline": "REINFORCE++ with a baseline", "remax": "ReMax",
}  # fmt: skip
"""Stage or estimator -> its usual name."""
SWITCHES = (
    ("algorithm.kl_ctrl", "type", "adaptive", ("target_kl", "horizon")),
    ("validation", "do_sample", True, ("temperature", "top_k", "top_p")),
    ("actor_rollout", "do_sample", True, ("temperature", "top_k", "top_p")),
)
"""(section, key, value, keys of the section that only this value uses)."""


@dataclass(frozen=True)
class RunFolder:
    """A run to report on. state: finished, running, failed or stopped; name: shown for the path"""

    path: Path
    name: str
    state: str
    split: TokenSplitter | None = None


def gather(run: RunFolder) -> dict[str, Any]:
    """Read the files of a run; return everything that the page shows except samples."""
    iterations, failures = read_iterations(run.path), read_failures(run.path)
    configs = read_configs(run.path)
    config = configs[-1][1] if configs else {}
    checkpoints, environment = read_checkpoints(run.path)
    curves, kl_limit = make_curves(iterations), read_kl_limit(config)
    return {
        "name": run.name,
        "state": run.state,
        "done": max((each.number for each in iterations), default=0),
        "planned": config.get("training.train_iters"),
        "seconds": wall_seconds(iterations),
        "subject": name_subject(config),
        "answers": answer_all(iterations, config),
        "illnesses": find_illnesses(run.path, iterations, failures, kl_limit),
        "checks": list_checks(iterations, config),
        "judged": {each.name: each.text for each in check_ranges(iterations)},
        "curves": curves,
        "about": describe_metrics(list(curves)),
        "schedules": read_schedules(run.path),
        "config": config,
        "unused": find_unused(config),
        "changes": _list_changes(configs),
        "environment": environment,
        "checkpoints": checkpoints,
        "failures": failures,
        "resumes": read_resumes(run.path),
    }


def name_subject(config: Mapping[str, Any]) -> str:
    """Return method and model of a run, as `PPO, model qwen (Qwen2.5-7B)`; "" if one is not set."""
    stage, estimator = config.get("training.stage"), config.get("algorithm.adv_estimator")
    method = METHODS.get(str(stage)) or METHODS.get(str(estimator), estimator)
    model, load = config.get("actor_rollout.model"), config.get("actor_rollout.load")
    if model is None or method is None:
        return ""
    folder = f" ({Path(load).name})" if isinstance(load, str) else ""
    return printable(f"{method}, model {model}{folder}")


def find_unused(config: Mapping[str, Any]) -> dict[str, str]:
    """Return key -> the `key=value` of this configuration that disables it."""
    return {
        f"{section}.{name}": f"{section}.{switch}={str(config[f'{section}.{switch}']).lower()}"
        for section, switch, value, names in SWITCHES
        if config.get(f"{section}.{switch}", value) != value
        for name in names
    }


def name_runs(paths: Sequence[Path]) -> list[str]:
    """Return a name for each path: as few of its last parts as make the names differ."""
    full = [path.absolute() for path in paths]
    for count in range(1, max(len(path.parts) for path in full)):
        names = [printable("/".join(path.parts[-count:])) for path in full]
        if len(set(names)) == len(names):
            return names
    return [printable(str(path)) for path in full]


def _list_changes(configs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row {file, key, before, after} per key that a later configuration changes."""
    found = []
    for (_, before), (name, after) in itertools.pairwise(configs):
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key):
                row = {"file": name, "key": key, "before": before.get(key), "after": after.get(key)}
                found.append(row)
    return found
