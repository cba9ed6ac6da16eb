"""Five configurations of MindSpeed-LLM as trees of keys and values: three of PPO, one of GRPO and
one of online DPO."""

import copy
from pathlib import Path
from typing import Any

import yaml

Tree = dict[str, Any]

MODELS: dict[str, Tree] = {
    "llama32-1b": {
        "num_layers": 16, "hidden_size": 2048, "ffn_hidden_size": 8192,
        "num_attention_heads": 32, "group_query_attention": True, "num_query_groups": 8,
        "padded_vocab_size": 128256, "rotary_base": 500000, "rope_scaling_type": "llama3",
        "rope_scaling_factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "max_position_embeddings": 8192,
        "norm_epsilon": 1e-5, "sequence_parallel": True, "use_mc2": True, "init_method_std": 0.01,
        "use_flash_attn": True, "use_fused_rmsnorm": True, "use_fused_swiglu": True,
        "use_rotary_position_embeddings": True,
    },
    "llama3-8b": {
        "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336,
        "num_attention_heads": 32, "group_query_attention": True, "num_query_groups": 8,
        "vocab_size": 128256, "padded_vocab_size": 128256, "rotary_base": 500000,
        "rope_scaling_type": "llama3", "rope_scaling_factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "max_position_embeddings": 8192, "norm_epsilon": 1e-5, "sequence_parallel": True,
        "init_method_std": 0.02, "use_flash_attn": True, "use_rotary_position_embeddings": True,
        "rotary_percent": 1.0, "untie_embeddings_and_output_weights": True, "seed": 42,
    },
    "llama2-7b": {
        "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 11008,
        "num_attention_heads": 32, "max_position_embeddings": 4096, "sequence_parallel": True,
        "seq_length": 4096, "use_mc2": True, "init_method_std": 0.01, "use_flash_attn": True,
        "use_fused_rmsnorm": True, "use_fused_swiglu": True, "use_fused_rotary_pos_emb": True,
        "untie_embeddings_and_output_weights": True,
    },
}  # fmt: skip
ALL_MODELS: Tree = {
    "use_mcore_models": True, "normalization": "RMSNorm", "swiglu": True,
    "position_embedding_type": "rope", "disable_bias_linear": True, "attention_dropout": 0.0,
    "hidden_dropout": 0.0, "no_masked_softmax_fusion": True, "attention_softmax_in_fp32": True,
    "no_gradient_accumulation_fusion": True, "bf16": True, "make_vocab_size_divisible_by": 1,
}  # fmt: skip
OPTIMIZER: Tree = {
    "lr": 1e-7, "lr_decay_style": "constant", "min_lr": 0.0, "weight_decay": 0.0,
    "lr_warmup_fraction": 0.0, "clip_grad": 1.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "initial_loss_scale": 1,
}  # fmt: skip


def ppo_8b() -> Tree:
    """Return ppo_trainer_llama3_8b, on which the other configurations are based."""
    model = "llama3-8b"
    return {
        "defaults": [{"model": [model]}],
        "training": {
            "global_batch_size": 2, "seq_length": 512, "tokenizer_type": "PretrainedFromHF",
            "tokenizer_name_or_path": "./models/llama-3-8b/", "train_iters": 1000,
            "distributed_backend": "nccl", "no_shared_storage": True, "save_interval": 10000,
            "no_load_optim": True, "no_load_rng": True, "bf16": True,
            "is_instruction_dataset": True, "variable_seq_lengths": True, "no_shuffle": True,
            "stage": "ray_ppo", "sequence_parallel": False,
        },
        "actor_rollout_ref": {
            "actor_rollout": {
                "model": model, "do_sample": False, "micro_batch_size": 1,
                "ppo_mini_batch_size": 1, "num_samples_per_step": 1, "max_prompt_length": 256,
                "ppo_epochs": 1, "clip_ratio": 0.2, "entropy_coeff": 0.001,
                "shuffle_minibatch": False, "use_kv_cache": True,
                "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
                **OPTIMIZER, "initial_loss_scale": 4096, "finetune": True, "load": "./ckpt",
                "save": "./ckpt", "num_gpus_for_train": 4, "num_gpus_for_infer": 4,
                "pad_to_multiple_of": 1,
                "data_path": "./dataset/descriptiveness/descriptiveness", "split": "100,0,0",
            },
            "ref": {
                "model": model, "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 1, "micro_batch_size": 1, "load": "./ckpt",
            },
        },
        "critic": {
            "model": model, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
            "use_mcore_models": True, "micro_batch_size": 1, **OPTIMIZER,
            "use_distributed_optimizer": True, "no_load_optim": True, "no_load_rng": True,
            "load": "./ckpt", "save": "./ckpt", "cliprange_value": 0.2,
            "critic_mini_batch_size": 1, "critic_update_epochs": 1,
        },
        "reward": {
            "model": model, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1,
            "micro_batch_size": 1, "load": "./ckpt",
        },
        "algorithm": {
            "gamma": 1.0, "lam": 0.95, "adv_estimator": "gae", "kl_penalty": "kl",
            "kl_ctrl": {"type": "fixed", "kl_coef": 0.05}, "missing_eos_penalty": 0.0,
        },
        "resource_pool": {"actor_rollout": [8], "ref": [2], "critic": [4], "reward": [2]},
    }  # fmt: skip


def ppo_7b() -> Tree:
    """Return ppo_trainer_llama2_7b."""
    tree = _with_model(ppo_8b(), "llama2-7b", "./models/llama-2-7b/")
    tree["training"]["global_batch_size"] = 1
    actor, critic = tree["actor_rollout_ref"]["actor_rollout"], tree["critic"]
    for role in (actor, critic):
        role |= {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1}
        role |= {"adam_beta2": 0.95, "initial_loss_scale": 1}
    return tree


def ppo_1b() -> Tree:
    """Return ppo_trainer_llama32_1b."""
    tree = _with_model(ppo_8b(), "llama32-1b", "./models/llama-3.2-1b-instruct/")
    tree["training"]["global_batch_size"] = 8
    del tree["training"]["sequence_parallel"]
    actor, ref = tree["actor_rollout_ref"]["actor_rollout"], tree["actor_rollout_ref"]["ref"]
    critic, reward = tree["critic"], tree["reward"]
    for role in (actor, ref, critic, reward):
        role |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    for role in (actor, critic):
        role |= {"micro_batch_size": 4, "clip_grad": 10000.0, "initial_loss_scale": 4096}
    actor |= {"ppo_mini_batch_size": 4, "num_samples_per_step": 2}
    actor |= {"num_gpus_for_train": 1, "num_gpus_for_infer": 1}
    critic |= {"critic_mini_batch_size": 4, "sequence_parallel": False}
    critic |= {"is_instruction_dataset": True, "variable_seq_lengths": True}
    ref["micro_batch_size"] = 8
    reward |= {"micro_batch_size": 8, "sequence_parallel": False}
    tree["resource_pool"] = {"actor_rollout": [2], "ref": [1], "critic": [1], "reward": [1]}
    return tree


def without_critic() -> Tree:
    """Return what the 1B configurations of GRPO and online DPO have in common."""
    tree = ppo_1b()
    del tree["critic"], tree["resource_pool"]["critic"]
    actor = tree["actor_rollout_ref"]["actor_rollout"]
    actor |= {"do_sample": True, "load": "./models/llama-3.2-1b-instruct-tp1-pp1"}
    tree["actor_rollout_ref"]["ref"]["load"] = "./models/llama-3.2-1b-instruct-tp1-pp1"
    tree["reward"]["load"] = "./models/llama-3.2-1b-rm-mcore-tp1-pp1"
    return tree


def grpo_1b() -> Tree:
    """Return ray_grpo_full_llama32_1b_tp1pp1."""
    tree = without_critic()
    tree["training"] |= {"stage": "ray_grpo", "global_batch_size": 1, "seq_length": 309}
    tree["training"] |= {"train_iters": 15, "sequence_parallel": False, "use_deter_comp": True}
    actor, ref = tree["actor_rollout_ref"]["actor_rollout"], tree["actor_rollout_ref"]["ref"]
    for role in (actor, ref, tree["reward"]):
        role["micro_batch_size"] = 1
    actor |= {"ppo_mini_batch_size": 1, "num_samples_per_step": 1, "n_samples_per_prompt": 2}
    del tree["reward"]["sequence_parallel"]
    tree["algorithm"]["adv_estimator"] = "group_norm"
    return tree


def online_dpo_1b() -> Tree:
    """Return online_dpo_trainer_llama32_1b."""
    tree = without_critic()
    tree["training"] |= {"stage": "ray_online_dpo", "global_batch_size": 4}
    actor, ref = tree["actor_rollout_ref"]["actor_rollout"], tree["actor_rollout_ref"]["ref"]
    for role in (actor, ref, tree["reward"]):
        role["micro_batch_size"] = 4
    actor |= {"ppo_mini_batch_size": 4, "num_samples_per_step": 4, "shuffle": False}
    actor |= {"no_shuffle": tree["training"].pop("no_shuffle"), "missing_eos_penalty": 1.0}
    actor["inference_tensor_model_parallel_size"] = 1
    del actor["shuffle_minibatch"]
    tree["algorithm"]["missing_eos_penalty"] = 1.0
    return tree


PPO = {
    "ppo_trainer_llama32_1b": ppo_1b,
    "ppo_trainer_llama3_8b": ppo_8b,
    "ppo_trainer_llama2_7b": ppo_7b,
}
WITHOUT_CRITIC = {
    "ray_grpo_full_llama32_1b_tp1pp1": grpo_1b,
    "online_dpo_trainer_llama32_1b": online_dpo_1b,
}
EVERY = {**PPO, **WITHOUT_CRITIC}


def models() -> Tree:
    """Return the section `model` that composing these configurations gives."""
    return {name: {**ALL_MODELS, **copy.deepcopy(own)} for name, own in MODELS.items()}


def write(folder: Path) -> None:
    """Write all five configurations to a folder that `--config-dir` can name."""
    for name, make in EVERY.items():
        write_one(folder, name, make(), models())


def write_one(folder: Path, name: str, tree: Tree, models: Tree) -> None:
    """Write the configuration `name`, and a file for each of its models."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    for model, keys in models.items():
        _dump(folder / "model" / f"{model}.yaml", {model: keys})
    _dump(folder / f"{name}.yaml", tree)


def _dump(file: Path, tree: Tree) -> None:
    file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


def _with_model(tree: Tree, model: str, tokenizer: str) -> Tree:
    """Return a copy of the tree in which every role has this model."""
    tree = copy.deepcopy(tree)
    tree["defaults"] = [{"model": [model]}]
    tree["training"]["tokenizer_name_or_path"] = tokenizer
    for role in (*tree["actor_rollout_ref"].values(), tree["critic"], tree["reward"]):
        role["model"] = model
    return tree
