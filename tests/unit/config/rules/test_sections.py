"""Rules across sections; the tree has 96 samples, 8 ranks, 8 heads, 4 groups and 4 layers."""

from typing import Any

import pytest

SPARSE: dict[str, Any] = {"model.small.num_experts": 12, "model.small.moe_ffn_hidden_size": 48}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def keys(role: str, **values: Any) -> dict[str, Any]:
    return {f"{role}.{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training.sequence_parallel": True},  # just off without tensor parallel
        {"data.val_files": None},
        {"data.train_files": None, "data.data_path": "prompts/a"},
        SPARSE,
        {**SPARSE, "training.expert_model_parallel_size": 4},
        {**SPARSE, **keys("training", **TP2, expert_model_parallel_size=4)},
        {**SPARSE, **keys("ref", tensor_model_parallel_size=2)},  # a frozen role
    ],
)
def test_a_valid_tree_has_no_problem(problems, changes):
    assert problems(changes) == []


# 8 heads, 4 groups, 96 wide, 4 layers, 8 ranks: (changes, the key and value that are refused)
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"ref.tensor_model_parallel_size": 2, "model.small.num_attention_heads": 12,
     "model.small.num_query_groups": 3, "model.small.kv_channels": 8},
     "ref.tensor_model_parallel_size=2"),
    ({"ref.tensor_model_parallel_size": 8, "model.small.num_query_groups": 1,
     "model.small.kv_channels": 2}, "ref.tensor_model_parallel_size=8"),
    ({"ref.pipeline_model_parallel_size": 8}, "ref.pipeline_model_parallel_size=8"),
    ({"ref.num_layers_per_virtual_pipeline_stage": 2},
     "ref.num_layers_per_virtual_pipeline_stage=2"),
    ({"ref.pipeline_model_parallel_size": 2, "ref.num_layers": 8,
     "ref.num_layers_per_virtual_pipeline_stage": 3},
     "ref.num_layers_per_virtual_pipeline_stage=3"),
    ({"critic.recompute": "full", "critic.recompute_num_layers": 3},
     "critic.recompute_num_layers=3"),
    ({"critic.recompute": "full", "critic.recompute_method": "block",
     "critic.pipeline_model_parallel_size": 2, "critic.recompute_num_layers": 3},
     "critic.recompute_num_layers=3"),
    ({"critic.tensor_model_parallel_size": 2, "critic.ffn_hidden_size": 97},
     "critic.tensor_model_parallel_size=2"),
    ({"critic.tensor_model_parallel_size": 2, "resource_pool.main": [5, 3]},
     "resource_pool.main=[5,"),
    ({"ref.pipeline_model_parallel_size": 4, "resource_pool.main": 6}, "resource_pool.main=6"),
    ({"actor_rollout.max_new_tokens": 17}, "training.seq_length=24"),
    ({"training.seq_length": 65}, "training.seq_length=65"),
    ({"rollout.engine": "vllm", "actor_rollout.do_sample": True, "actor_rollout.top_p": 0.9,
      "actor_rollout.temperature": 0.7}, "actor_rollout.temperature=0.7"),
    ({"actor_rollout.min_new_tokens": 20}, "actor_rollout.min_new_tokens=20"),
    ({"actor_rollout.n_samples_per_prompt": 2}, "actor_rollout.n_samples_per_prompt=2"),
    ({"actor_rollout.stop_token_ids": [3, 32]}, "actor_rollout.stop_token_ids=[32]"),
    ({"actor_rollout.lr_decay_style": "cosine", "actor_rollout.min_lr": 1.0},
     "actor_rollout.min_lr=1"),
    ({"validation.interval": 2}, "validation.interval=2"),
    ({"validation.only": True}, "validation.only=true"),
    ({"validation.n_samples": 4}, "validation.n_samples=4"),
    ({"validation.reward": "model"}, "validation.reward=model"),
    ({"validation.reward": "huggingface"}, "validation.reward=huggingface"),
    ({"validation.n_samples": 6, "validation.do_sample": True, "validation.best_metric": "pass@3"},
     "validation.best_metric=pass@3"),
    ({"validation.best_metric": "gsm8k/score"}, "validation.best_metric=gsm8k/score"),
    ({"algorithm.max_log_prob_gap": 0.5, "algorithm.old_log_probs": "rollout"},
     "algorithm.max_log_prob_gap=0.5"),
    ({"data.data_path": "prompts/a"}, "data.train_files"),
    ({"data.val_files": "a.jsonl", "data.val_data_path": "prompts/a"}, "data.val_files"),
    ({"placement.ref": "mian"}, "placement.ref=mian"),
    ({"resource_pool.spare": 1}, "resource_pool.spare"),
    ({"model.small.num_attention_heads": 12, "model.small.num_query_groups": 12},
     "model.small.num_attention_heads=12"),
    ({"model.small.num_query_groups": 3}, "model.small.num_query_groups=3"),
    ({"model.small.kv_channels": 7}, "model.small.kv_channels:"),
    ({"model.small.rope_scaling_type": "llama3"}, "model.small.original_max_position_embeddings"),
    ({"reward": {"kind": "model", "load": None}, "placement.reward": "main"}, "reward.load"),
    ({"data.train_files": None}, "data.train_files"),
    (keys("ref", expert_model_parallel_size=2), "ref.expert_model_parallel_size=2"),
    ({"model.small.moe_ffn_hidden_size": 48}, "model.small.moe_ffn_hidden_size=48"),
    ({**SPARSE, **keys("ref", expert_model_parallel_size=8)}, "ref.expert_model_parallel_size=8"),
    ({**SPARSE, **keys("ref", expert_model_parallel_size=3)}, "ref.expert_model_parallel_size=3"),
    ({**SPARSE, **keys("ref", tensor_model_parallel_size=4, expert_model_parallel_size=4)},
     "ref.expert_model_parallel_size=4"),
    ({**SPARSE, "model.small.moe_router_topk": 13}, "model.small.moe_router_topk=13"),
    ({**SPARSE, "model.small.moe_router_topk": 1}, "model.small.moe_router_topk=1"),
    ({**SPARSE, **keys("critic", tensor_model_parallel_size=2)}, "critic.sequence_parallel=false"),
    ({**SPARSE, "model.small.moe_aux_loss_coeff": 0.01, **keys("critic",
     pipeline_model_parallel_size=2)}, "model.small.moe_aux_loss_coeff=0.01"),
    ({**SPARSE, "model.small.moe_ffn_hidden_size": 45, **keys("training", **TP2)},
     "training.tensor_model_parallel_size=2"),
    ({"ref.offload": {"optimizer": True}}, "ref.offload.optimizer=true"),
    ({"reward.kind": "model", "placement.reward": "main", "reward.offload.optimizer": True},
     "reward.offload.optimizer=true"),
    ({"training.offload": True}, "training.offload=true"),
    ({"actor_rollout_ref.actor_rollout.offload.optimizer": 1},
     "actor_rollout_ref.actor_rollout.offload.optimizer=1"),
    ({"resource_pool.main": 12, "runtime.address": "head:6379"}, "resource_pool.main=12 8 or 16"),
    ({"resource_pool.wait_s": -1}, "resource_pool.wait_s=-1 must be greater than 0"),
    ({"resource_pool.env": {"A": True}}, "resource_pool.env.A=true"),
]  # fmt: skip


def test_a_broken_rule_is_one_problem_of_its_key(check_cases):
    check_cases((changes, [head]) for changes, head in BROKEN)
