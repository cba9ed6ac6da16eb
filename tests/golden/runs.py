"""Run twenty iterations of the tiny task for an estimator, from stored weights, on one process."""

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig
from tests import training
from tests.distributed import agents
from tests.processes import read_metrics

FOLDER = Path(__file__).resolve().parent
START, TRACES = FOLDER / "start", FOLDER / "traces"
ITERATIONS = 20
# `critic/kl` of these traces was measured by the pass before the update.
WITH_PASS = {"training.global_batch_size": 32, "algorithm.old_log_probs": "recompute"}
# Small enough that a run takes seconds. The sizes of the model are those of the weights in `start`.
SMALL = {
    "model.tiny.num_layers": 2,
    "model.tiny.hidden_size": 48,
    "model.tiny.ffn_hidden_size": 96,
    "training.train_iters": ITERATIONS,
    "training.share_prompts": False,  # as the older code that made the traces
    "training.tokenizer_name_or_path": START,
    "actor_rollout.load": START,
    "actor_rollout.ppo_mini_batch_size": 32,
    "actor_rollout.micro_batch_size": 16,
    "actor_rollout.lr": 2e-4,
    "actor_rollout.ppo_epochs": 2,
    "ref.load": START,
    "data.train_files": START / "prompts.jsonl",
    "data.val_files": "[]",
    "validation.interval": 0,
    "resource_pool.main": 1,
    "device.kind": "cpu",
}
PPO = {
    "training.global_batch_size": 64,
    "critic.load": START,
    "critic.critic_mini_batch_size": 32,
    "critic.micro_batch_size": 16,
}
GROUPS = {"training.global_batch_size": 16, "actor_rollout.n_samples_per_prompt": 4}
# As ppo_trainer_qwen3_8b_agents: conversations of two turns, one to each prompt.
SAO = {
    **PPO,
    "training.plugins": f"[{agents.__file__}]",
    "training.seq_length": 24,
    "actor_rollout.max_new_tokens": 16,
    "actor_rollout.ppo_epochs": 1,
    "actor_rollout.policy_loss": "dis",
    "actor_rollout.clip_ratio_low": 0.2,
    "actor_rollout.clip_ratio_high": 0.28,
    "critic.critic_mini_batch_size": 64,
    "critic.critic_update_epochs": 2,
    "critic.freeze": "attention",
    "critic.warmup_iters": 2,
    "critic.freeze_after": 17,
    "rollout.agent": "two_turns",
    "+reward.rules": "{arithmetic: agent}",
    "algorithm.old_log_probs": "rollout",
    "algorithm.lam_alpha": 0.5,
    "algorithm.critic_lam": 1.0,
    "algorithm.kl_ctrl.kl_coef": 0.0,
}
# name -> (configuration, keys that are changed in it)
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gae": ("ppo_trainer_tiny", PPO),
    "gae_full_kl": ("ppo_trainer_tiny", {**PPO, "algorithm.kl_penalty": "full"}),
    "grpo": ("grpo_trainer_tiny", GROUPS),
    "grpo_shared_prompts": ("grpo_trainer_tiny", {**GROUPS, "training.share_prompts": True}),
    "dapo": ("grpo_trainer_tiny", {
        **GROUPS, "algorithm.filter_groups": True, "algorithm.overlong_buffer_len": 4,
        "actor_rollout.clip_ratio_high": 0.28,
    }),
    "dr_grpo": ("grpo_trainer_tiny", {
        **GROUPS, "algorithm.adv_estimator": "dr_grpo",
        "algorithm.loss_normalizer": "sequence_sums",
    }),
    "rloo": ("grpo_trainer_tiny", {
        **GROUPS, "algorithm.adv_estimator": "rloo", "actor_rollout.policy_loss": "gspo",
    }),
    "reinforce_plus_plus": ("grpo_trainer_tiny", {
        **GROUPS, "algorithm.adv_estimator": "reinforce_plus_plus",
        "algorithm.kl_in": "reward", "algorithm.kl_penalty": "kl",
    }),
    "reinforce_plus_plus_baseline": ("grpo_trainer_tiny", {
        **GROUPS, "algorithm.adv_estimator": "reinforce_plus_plus_baseline",
    }),
    "remax": ("grpo_trainer_tiny", {**GROUPS, "algorithm.adv_estimator": "remax"}),
    "sao": ("ppo_trainer_tiny", SAO),
    "online_dpo": ("online_dpo_trainer_tiny", WITH_PASS),
    "online_ipo": ("online_dpo_trainer_tiny", {**WITH_PASS, "actor_rollout.dpo_loss_type": "ipo"}),
}  # fmt: skip
KEPT = (
    "actor/pg_loss", "actor/dpo_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm",
    "actor/pg_clipfrac", "critic/vf_loss", "critic/grad_norm", "critic/kl", "critic/score/mean",
    "critic/advantages/max", "response_length/mean", "rollout/gen_batches",
)  # fmt: skip

Curves = dict[str, list[float]]

WRITTEN: set[str] = set()
"""Names of all metrics that runs of this process have written."""


def golden_config(name: str, out: Path, more: dict[str, Any]) -> RunConfig:
    base, changes = SETTINGS[name]
    changes = {**SMALL, **changes, **more, "training.output_dir": out}
    return resolve(compose(base, [f"{key}={value}" for key, value in changes.items()]), name)


def run(name: str, out: Path, runtime: Any, more: dict[str, Any] | None = None) -> Curves:
    """Run a setting; return the metrics of KEPT, a list over the iterations for each.

    out: run directory. more: further keys to change. Adds the names of all metrics to WRITTEN.
    """
    config = golden_config(name, out, more or {})
    lines = read_metrics(training.run(config, runtime).path)
    assert len(lines) == config.training.train_iters
    WRITTEN.update(*lines)
    curves = {key: [line[key] for line in lines if key in line] for key in KEPT}
    return {key: values for key, values in curves.items() if values}


def fingerprint() -> dict[str, str]:
    """Return the facts of this machine that the last bit of a float depends on."""
    flags = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    import megatron.core

    return {
        "machine": platform.machine(),
        "cpu_flags": hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:16],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
        "threads": "1",
    }


def read_trace(name: str) -> tuple[dict[str, str], Curves]:
    """Return the fingerprint and the curves of a stored trace."""
    tree = json.loads((TRACES / f"{name}.json").read_text(encoding="utf-8"))
    return tree["fingerprint"], tree["curves"]


def write_trace(name: str, curves: Curves) -> None:
    """Store the curves with the fingerprint of this machine."""
    TRACES.mkdir(exist_ok=True)
    tree = {"fingerprint": fingerprint(), "curves": curves}
    text = json.dumps(tree, indent=1)
    (TRACES / f"{name}.json").write_text(text + "\n", encoding="utf-8")
