"""The command line of a run of a few seconds, which trains a tiny Llama on sums.

It starts from the weights of tests/golden/start, which solve about half of the problems.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
START = ROOT / "tests" / "golden" / "start"


def settings(output: Path, devices: int, start: Path = START) -> list[str]:
    """Overrides of `ppo_trainer_tiny`. devices: of its one pool; start: weights and prompts"""
    changes = {
        "training.output_dir": output, "training.global_batch_size": 8,
        "training.tokenizer_name_or_path": start,
        **{f"{role}.model": "auto" for role in ("actor_rollout", "ref", "critic")},
        **{f"{role}.load": start for role in ("actor_rollout", "ref", "critic")},
        **{f"{role}.micro_batch_size": 2 for role in ("actor_rollout", "ref", "critic")},
        "actor_rollout.ppo_mini_batch_size": 4, "critic.critic_mini_batch_size": 4,
        "data.train_files": start / "prompts.jsonl", "data.val_files": "[]",
        "validation.interval": 0, "resource_pool.main": devices,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in changes.items()]


def command(output: Path, *more: str) -> list[str]:
    """Return the command of a run on CPU with two workers and a Ray cluster of its own.

    It has to be started in `ROOT`. more: further overrides
    """
    where = ("device.kind=cpu", "runtime.address=local")
    run = [sys.executable, "ray_gpt.py", "--config-name", "ppo_trainer_tiny"]
    return [*run, *settings(output, devices=2), *where, *more]
