"""The command line of a run of seconds: sums for a Llama that has learnt a little of them."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
START = ROOT / "tests" / "golden" / "start"


def settings(output: Path, devices: int) -> list[str]:
    """Of `ppo_trainer_tiny`; devices: of its one pool"""
    changes = {
        "training.output_dir": output,
        "training.global_batch_size": 8,
        "training.tokenizer_name_or_path": START,
        **{f"{role}.model": "auto" for role in ("actor_rollout", "ref", "critic")},
        **{f"{role}.load": START for role in ("actor_rollout", "ref", "critic")},
        **{f"{role}.micro_batch_size": 2 for role in ("actor_rollout", "ref", "critic")},
        "actor_rollout.ppo_mini_batch_size": 4,
        "critic.critic_mini_batch_size": 4,
        "data.train_files": START / "prompts.jsonl",
        "data.val_files": "[]",
        "validation.interval": 0,
        "resource_pool.main": devices,
    }
    return [f"{key}={value}" for key, value in changes.items()]


def command(output: Path, *more: str) -> list[str]:
    """With two workers on a cluster of its own; to be run in `ROOT`."""
    where = ("device.kind=cpu", "runtime.address=local")
    run = [sys.executable, "ray_gpt.py", "--config-name", "ppo_trainer_tiny"]
    return [*run, *settings(output, devices=2), *where, *more]
