"""PPO on the tiny task with a random model that vLLM can load, by the command line."""

from pathlib import Path
from typing import Any

from tests.golden.runs import START
from tests.vllm.conftest import ARCHITECTURE

KEYS = {
    "model.tiny.num_layers": 2, "model.tiny.hidden_size": 64, "model.tiny.ffn_hidden_size": 96,
    "model.tiny.num_attention_heads": 2, "model.tiny.num_query_groups": 1,
    "model.tiny.max_position_embeddings": ARCHITECTURE.max_position_embeddings,
    "training.global_batch_size": 32, "training.tokenizer_name_or_path": START,
    "actor_rollout.ppo_mini_batch_size": 32, "actor_rollout.micro_batch_size": 16,
    "critic.critic_mini_batch_size": 32, "critic.micro_batch_size": 16,
    "data.train_files": START / "prompts.jsonl", "data.val_files": "[]", "validation.interval": 0,
    "resource_pool.main": 1, "device.kind": "cpu", "logging.samples": "all", "training.seed": 1,
}  # fmt: skip


def command(model: Path, out: Path, **more: Any) -> list[str]:
    """Words after `python` for a run with this folder; `__` in names of keys stands for a dot."""
    loads = {f"{role}.load": model for role in ("actor_rollout", "ref", "critic")}
    keys = {**KEYS, **loads, "training.output_dir": out}
    keys |= {name.replace("__", "."): value for name, value in more.items()}
    words = ["ray_gpt.py", "--config-name", "ppo_trainer_tiny"]
    return [*words, *(f"{key}={value}" for key, value in keys.items())]


def served_by(python: str) -> dict[str, Any]:
    return {"rollout__engine": "vllm", "rollout__vllm__python": python}
