"""Rules across sections; the tree has 96 samples, 8 ranks, 8 heads, 4 groups and 4 layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Problems = Callable[..., list[str]]

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
def test_a_valid_tree_has_no_problem(problems: Problems, changes: dict[str, Any]) -> None:
    assert problems(changes) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            # 12 heads, 3 groups, 96 wide: 1, 3, 6 or 12
            {
                "ref.tensor_model_parallel_size": 2,
                "model.small.num_attention_heads": 12,
                "model.small.num_query_groups": 3,
                "model.small.kv_channels": 8,
            },
            "ref.tensor_model_parallel_size=2 must divide model.small.num_query_groups=3, or be a "
            "multiple of it; use 1 or 3",
        ),
        (
            # 8 query heads, a key and a value head, of width 2 each
            {
                "ref.tensor_model_parallel_size": 8,
                "model.small.num_query_groups": 1,
                "model.small.kv_channels": 2,
            },
            "ref.tensor_model_parallel_size=8 must divide the 20 rows of model.small's query, key "
            "and value projections; use 4",
        ),
        (
            {"ref.pipeline_model_parallel_size": 8},
            "ref.pipeline_model_parallel_size=8 must divide the 4 layers of small; use 4",
        ),
        (
            {"ref.num_layers_per_virtual_pipeline_stage": 2},
            "ref.num_layers_per_virtual_pipeline_stage=2 needs ref.pipeline_model_parallel_size "
            "above 1; raise it, or use ref.num_layers_per_virtual_pipeline_stage=null",
        ),
        (
            {
                "ref.pipeline_model_parallel_size": 2,
                "ref.num_layers": 8,
                "ref.num_layers_per_virtual_pipeline_stage": 3,
            },
            "ref.num_layers_per_virtual_pipeline_stage=3 must divide the 4 layers of a pipeline "
            "stage of small; use 2 or 4",
        ),
        (
            {"critic.recompute": "full", "critic.recompute_num_layers": 3},
            "critic.recompute_num_layers=3 must divide the 4 layers of a stage or chunk of small "
            "with critic.recompute_method=uniform; use 2 or 4",
        ),
        (
            {
                "critic.recompute": "full",
                "critic.recompute_method": "block",
                "critic.pipeline_model_parallel_size": 2,
                "critic.recompute_num_layers": 3,
            },
            "critic.recompute_num_layers=3 must be at most the 2 layers of a stage or chunk of "
            "small; use 2 or less",
        ),
        (
            {"critic.tensor_model_parallel_size": 2, "critic.ffn_hidden_size": 97},
            "critic.tensor_model_parallel_size=2 must divide critic.ffn_hidden_size=97; use 1",
        ),
        (
            {"critic.tensor_model_parallel_size": 2, "resource_pool.main": [5, 3]},
            "resource_pool.main: 5 processes on a node must be a multiple of the tensor-parallel "
            "size 2 of critic, which may not span nodes; use 4 or 6, or allow it with "
            "resource_pool.tensor_parallel_spans_nodes=true",
        ),
        (
            {"ref.pipeline_model_parallel_size": 4, "resource_pool.main": 6},
            "resource_pool.main=6 must be a multiple of TP 1 x PP 4 = 4 of the reference (ref); "
            "use 4 or 8",
        ),
        (
            {"actor_rollout.max_new_tokens": 17},
            "training.seq_length=24 must be at least actor_rollout.max_prompt_length=8 + "
            "actor_rollout.max_new_tokens=17; use 25 or more",
        ),
        (
            {"training.seq_length": 65},
            "training.seq_length=65 must be at most model.small.max_position_embeddings=64 of the "
            "actor; use 64 or less",
        ),
        (
            {"actor_rollout.min_new_tokens": 20},
            "actor_rollout.min_new_tokens=20 must be at most actor_rollout.max_new_tokens=16; "
            "use 16 or less",
        ),
        (
            {"actor_rollout.n_samples_per_prompt": 2},
            "actor_rollout.n_samples_per_prompt=2 must be 1 with actor_rollout.do_sample=false, "
            "where every sample would be the same; use actor_rollout.do_sample=true",
        ),
        (
            {"actor_rollout.stop_token_ids": [3, 32]},
            "actor_rollout.stop_token_ids=[32] must be token ids below vocab_size=32; remove them",
        ),
        (
            {"actor_rollout.lr_decay_style": "cosine", "actor_rollout.min_lr": 1.0},
            "actor_rollout.min_lr=1 must be at most actor_rollout.lr=0.0001; use 0.0001 or less",
        ),
        (
            {"validation.interval": 2},
            "validation.interval=2 needs data.val_files or data.val_data_path; name a file, or use "
            "validation.interval=0",
        ),
        (
            {"validation.only": True},
            "validation.only=true needs data.val_files or data.val_data_path; name a file, or use "
            "validation.only=false",
        ),
        (
            {"validation.n_samples": 4},
            "validation.n_samples=4 must be 1 with validation.do_sample=false, where every sample "
            "would be the same; use validation.do_sample=true",
        ),
        (
            {"validation.reward": "model"},
            "validation.reward=model needs reward.kind=model, a rule has no model; use rule",
        ),
        (
            {"validation.reward": "huggingface"},
            "validation.reward=huggingface needs reward.kind=model, a rule has no model; use rule",
        ),
        (
            {
                "validation.n_samples": 6,
                "validation.do_sample": True,
                "validation.best_metric": "pass@3",
            },
            "validation.best_metric=pass@3 must be one of score, mean@6, best@2, best@4, best@6, "
            "maj@6, pass@1, pass@2, pass@4, pass@6, which validation.n_samples=6 gives, or that of "
            "one data source, as val/SOURCE/score; use score",
        ),
        (
            {"validation.best_metric": "gsm8k/score"},
            "validation.best_metric=gsm8k/score must be one of score, mean@1, pass@1, which "
            "validation.n_samples=1 gives, or that of one data source, as val/SOURCE/score; use "
            "score",
        ),
        (
            {"algorithm.max_log_prob_gap": 0.5, "algorithm.old_log_probs": "rollout"},
            "algorithm.max_log_prob_gap=0.5 needs algorithm.old_log_probs=recompute, which is what "
            "it compares; remove one of them",
        ),
        (
            {"data.data_path": "prompts/a"},
            "data.train_files and data.data_path must not both be given, each names all prompts; "
            "remove one of them",
        ),
        (
            {"data.val_files": "a.jsonl", "data.val_data_path": "prompts/a"},
            "data.val_files and data.val_data_path must not both be given, each names all prompts; "
            "remove one of them",
        ),
        (
            {"placement.ref": "mian"},
            "placement.ref=mian must name a pool of resource_pool (main); use placement.ref=main, "
            "or add resource_pool.mian",
        ),
        (
            {"resource_pool.spare": 1},
            "resource_pool.spare must hold a role; remove it, or place a role on it",
        ),
        (
            {"model.small.num_attention_heads": 12, "model.small.num_query_groups": 12},
            "model.small.num_attention_heads=12 must divide hidden_size=64 where kv_channels is "
            "not given; use 8 or 16",
        ),
        (
            {"model.small.num_query_groups": 3},
            "model.small.num_query_groups=3 must divide num_attention_heads=8; use 2 or 4",
        ),
        (
            {"model.small.kv_channels": 7},
            "model.small.kv_channels: the head width 7 must be even for rotary positions; "
            "change it",
        ),
        (
            {"model.small.rope_scaling_type": "llama3"},
            "model.small.original_max_position_embeddings is required with "
            "rope_scaling_type=llama3; take it from the checkpoint's config.json",
        ),
        (
            {"reward": {"kind": "model", "load": None}, "placement.reward": "main"},
            "reward.load is required with reward.kind=model; give the folder of its weights",
        ),
        (
            {"data.train_files": None},
            "data.train_files is required; name files of prompts, or an indexed data set by "
            "data.data_path=PREFIX",
        ),
        (
            keys("ref", expert_model_parallel_size=2),
            "ref.expert_model_parallel_size=2 needs experts, model.small is dense; use 1, or set "
            "model.small.num_experts",
        ),
        (
            {"model.small.moe_ffn_hidden_size": 48},
            "model.small.moe_ffn_hidden_size=48 needs num_experts, the model is dense; remove it",
        ),
        (
            {**SPARSE, **keys("ref", expert_model_parallel_size=8)},
            "ref.expert_model_parallel_size=8 must divide model.small.num_experts=12; use 4",
        ),
        (
            {**SPARSE, **keys("ref", expert_model_parallel_size=3)},
            "ref.expert_model_parallel_size=3 must divide the data-parallel size 8; use 2 or 4",
        ),
        (
            {**SPARSE, **keys("ref", tensor_model_parallel_size=4, expert_model_parallel_size=4)},
            "ref.expert_model_parallel_size=4 must divide the data-parallel size 2; use 2",
        ),
        (
            {**SPARSE, "model.small.moe_router_topk": 13},
            "model.small.moe_router_topk=13 must be at most num_experts=12; use 12 or less",
        ),
        (
            {**SPARSE, "model.small.moe_router_topk": 1},
            "model.small.moe_router_topk=1 needs moe_router_pre_softmax=true, or every expert's "
            "weight is 1 and the router learns nothing; use moe_router_pre_softmax=true, or 2 "
            "experts",
        ),
        (
            {**SPARSE, "model.small.add_qkv_bias": True},
            "model.small.add_qkv_bias=true must be false with num_experts (Qwen3-MoE and "
            "Mixtral have no biases); use false",
        ),
        (
            {**SPARSE, **keys("critic", tensor_model_parallel_size=2)},
            "critic.sequence_parallel=false must be true where a model with experts learns with "
            "tensor_model_parallel_size=2; use critic.sequence_parallel=true",
        ),
        (
            {
                **SPARSE,
                "model.small.moe_aux_loss_coeff": 0.01,
                **keys("critic", pipeline_model_parallel_size=2),
            },
            "model.small.moe_aux_loss_coeff=0.01 needs critic.pipeline_model_parallel_size=1, not "
            "2, whose last stage alone knows the weight of a micro-batch; use 0, or one stage",
        ),
        (
            {**SPARSE, "model.small.moe_ffn_hidden_size": 45, **keys("training", **TP2)},
            "training.tensor_model_parallel_size=2 must divide "
            "model.small.moe_ffn_hidden_size=45; use 1",
        ),
    ],
)
def test_rule_is_named_with_both_numbers_and_a_remedy(
    problems: Problems, changes: dict[str, Any], message: str
) -> None:
    assert message in problems(changes)


def test_a_coefficient_that_no_loss_reads_is_refused(problems: Problems) -> None:
    changes = {
        "model.small.moe_router_load_balancing_type": "none",
        "model.small.moe_aux_loss_coeff": 0.01,
        **keys("critic", pipeline_model_parallel_size=2),
    }
    assert problems({**SPARSE, **changes}) == [
        "model.small.moe_aux_loss_coeff=0.01 has no effect with "
        "moe_router_load_balancing_type=none; use 0, or aux_loss"
    ]
