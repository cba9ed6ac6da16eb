"""Every key of the schema changes the plan, a number, or which configurations are accepted.

A key without a case here is a failure. So is a case whose key changes nothing that is seen.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from mindspeed_rlxf.config.keys import PLAIN_SECTIONS, ROLE_SECTIONS
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.problems import ConfigError
from mindspeed_rlxf.config.rollout_section import ProgramConfig, ToolConfig
from mindspeed_rlxf.config.schema import (
    AlgorithmConfig,
    ArchitectureConfig,
    FunctionConfig,
    KlControlConfig,
    LoraConfig,
    OffloadConfig,
    OptimizerConfig,
    PoolSettings,
    RoleConfig,
    SandboxConfig,
    TrainingConfig,
    VllmConfig,
)
from tests.unit.config import observers as see
from tests.unit.config.conftest import TREE

MakeTree = Callable[..., dict[str, Any]]
Changes = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
CHECKPOINTS, STORE = "checkpoint/test_checkpoints.py", "checkpoint/test_store.py"
RUN_DIR, STREAM = "checkpoint/test_directory.py", "trainer/test_stream.py"
CONSOLE, RECORDER = "reporting/test_console.py", "trainer/test_recorder.py"
PROMPT_KEYS, PROMPTS = "data/test_prompt_keys.py", "data/test_prompts.py"
FUNCTIONS, MODEL_REWARD = "config/test_reward_functions.py", "roles/test_model_reward.py"
CONVERSATIONS, TOOLS = "roles/test_conversations.py", "agents/test_tools.py"
PROGRAMS = "roles/test_programs.py"
ROLES = ("actor_rollout", "ref", "critic", "reward")

ACTOR, CRITIC = "actor_rollout.", "critic."
SAMPLE = {f"{ACTOR}do_sample": True}
GROUPS = {"training.stage": "ray_grpo", **SAMPLE, f"{ACTOR}n_samples_per_prompt": 2}
SHARING = {**SAMPLE, f"{ACTOR}n_samples_per_prompt": 2, "training.micro_batch_size": 2}
PAIRS = {**GROUPS, "training.stage": "ray_online_dpo", f"{ACTOR}micro_batch_size": 2}
VERIFIER = {"reward": {"kind": "rule", "verifier": True}}
JOINED = {"runtime.address": "head:6379"}
ADAPTIVE = {"algorithm.kl_ctrl.type": "adaptive"}
OVERLONG = {"algorithm.overlong_buffer_len": 12}
EXPERTS = {"model.small.num_experts": 4}
LLAMA3 = {
    "model.small.rope_scaling_type": "llama3", "model.small.rope_scaling_factor": 4.0,
    "model.small.original_max_position_embeddings": 64,
}  # fmt: skip
SHARDED = {f"{ACTOR}use_distributed_optimizer": True, f"{ACTOR}overlap_grad_reduce": True}
DECAY = {f"{ACTOR}lr_decay_style": "linear"}
WRONG_SCORE = {"training.max_skipped": 77}
REWARD_MODEL = {"reward.kind": "model", "placement.reward": "main"}
SPLIT = {
    "resource_pool.other": 8, "placement.ref": "other", "placement.critic": "other",
    "placement.reward": "other", f"{ACTOR}num_gpus_for_train": 4, f"{ACTOR}num_gpus_for_infer": 4,
}  # fmt: skip
TWO_NODES = {"resource_pool.main": [4, 4]}


@dataclass(frozen=True)
class Case:
    """value: of the key, set over `base`; see: what has to change with it.

    also: keys that change with it, as a rule demands
    """

    value: Any
    see: see.Observer = see.planned
    base: Changes = field(default_factory=dict)
    also: Changes = field(default_factory=dict)


@dataclass(frozen=True)
class Refuses(Case):
    """The key moves the line between what is accepted and what is refused."""


@dataclass(frozen=True)
class Shown:
    """A test that is there shows it: one of whole objects, which a case here would only repeat."""

    file: str
    test: str


SAMPLING = Shown("roles/test_rollout.py", "test_every_sampling_key_reaches_generation")
TRAINING: dict[str, Any] = {
    "stage": Case("ray_online_dpo", see.experience, {**GROUPS, f"{ACTOR}micro_batch_size": 2}),
    "train_iters": Case(5), "global_batch_size": Case(192), "seq_length": Case(32),
    "tokenizer_name_or_path": Case("elsewhere"),
    "plugins": Shown("config/test_plugins.py", "test_rules_read_what_an_estimator_needs"),
    "seed": Case(7, see.driven), "max_restarts": Case(9, see.supervised),
    "node_wait_s": Case(9.0, see.supervised),
    "stop_grace_s": Case(9.0, see.supervised), "max_wall_time": Case("01:00:00", see.supervised),
    "output_dir": Case("elsewhere"), "run_name": Case("another"), "save_interval": Case(2),
    "save_interval_s": Case(60.0),
    "async_save": Shown(CHECKPOINTS, "test_an_asynchronous_save_is_published_once_all_wrote"),
    "keep_last": Case(5),
    "keep_every": Shown(STORE, "test_prune_keeps_the_newest_the_multiples_and_the_best"),
    "resume": Shown(RUN_DIR, "test_a_folder_of_another_run_is_refused"),
    "new_run": Shown(RUN_DIR, "test_new_run_takes_the_next_free_name"),
    "resume_from": Shown(CHECKPOINTS, "test_a_run_goes_back_once_and_loses_nothing"),
    "nan_policy": Case("skip", see.experience, WRONG_SCORE),
    "max_skipped": Case(3, see.learnt, {"training.nan_policy": "skip"}),
    "deterministic": Case(True, see.learnt),
}  # fmt: skip
ALGORITHM: dict[str, Any] = {
    "objective": Shown("config/test_plugins.py", "test_more_parts_are_chosen_by_their_names"),
    "adv_estimator": Case("rloo", see.experience, GROUPS), "gamma": Case(0.5, see.experience),
    "lam": Case(0.5, see.experience), "critic_lam": Case(1.0, see.experience),
    "lam_alpha": Case(0.5, see.experience), "kl_penalty": Case("mse", see.experience),
    "kl_in": Case("loss", see.loss), "reward_scale": Case(3.0, see.experience),
    "reward_clip": Case(0.5, see.experience), "whiten_rewards": Case(True, see.experience),
    "turn_rewards": Shown("roles/test_turn_rewards.py",
     "test_gae_goes_from_the_end_of_a_turn_to_the_next_turn"),
    "verifier_function": Case(["step"], see.scored, VERIFIER),
    "verifier_weight": Case([3.0], see.scored, VERIFIER),
    "missing_eos_penalty": Case(1.0, see.experience),
    "overlong_buffer_len": Case(12, see.experience),
    "overlong_penalty_factor": Case(2.0, see.experience, OVERLONG),
    "mask_truncated": Shown("roles/test_experience.py",
     "test_truncated_responses_count_in_their_group_and_are_not_trained"),
    "filter_groups": Shown(STREAM, "test_without_staleness_only_missing_groups_are_drawn_again"),
    "skip_zero_advantages": Shown("../distributed/test_policy_losses.py",
     "test_responses_without_advantages_are_not_in_the_mean"),
    "max_num_gen_batches": Shown(STREAM, "test_after_the_last_batch_alike_groups_fill_the_rest"),
    "score_position": Case("eos", see.experience),
    "score_slot_limit": Case("batch_width", see.driven), "advantage_whiten": Case("none", see.loss),
    "loss_normalizer": Case("sequence_means", see.loss),
    "old_log_probs": Case("rollout", see.driven), "rollout_is_threshold": Case(1.5, see.loss),
    "rollout_is_low": Case(0.9, see.loss, {"algorithm.rollout_is_threshold": 1.5}),
    "rollout_rejection": Shown("roles/test_experience.py",
     "test_rejected_tokens_count_for_their_group_and_are_not_trained"),
    "max_log_prob_gap": Shown("roles/test_gap.py",
     "test_a_gap_over_the_limit_names_the_worst_token"),
}  # fmt: skip
KL_CTRL: dict[str, Any] = {
    "type": Case("adaptive", see.driven), "kl_coef": Case(0.5, see.driven),
    "target_kl": Case(3.1, see.driven, ADAPTIVE), "horizon": Case(50, see.driven, ADAPTIVE),
}  # fmt: skip
OPTIMIZER: dict[str, Any] = {
    "lr": Case(1e-3, see.rates), "min_lr": Case(1e-6, see.rates, DECAY),
    "lr_decay_style": Case("cosine", see.rates), "lr_warmup_fraction": Case(0.5, see.rates),
    "weight_decay": Case(0.1, see.rates), "adam_beta1": Case(0.5, see.adam),
    "adam_beta2": Case(0.5, see.adam), "adam_eps": Case(1e-3, see.adam),
    "clip_grad": Case(0.5, see.adam), "use_distributed_optimizer": Case(True, see.adam),
    "overlap_grad_reduce": Case(True, see.wrapped),
    "overlap_param_gather": Case(True, see.wrapped, SHARDED),
    "reduce_each_micro_batch": Shown("../distributed/test_fsdp.py",
     "test_reduced_micro_batches_leave_no_whole_gradients"),
}  # fmt: skip
ARCHITECTURE: dict[str, Any] = {
    "num_layers": Case(8, see.megatron), "hidden_size": Case(128, see.megatron),
    "ffn_hidden_size": Case(128, see.megatron), "num_attention_heads": Case(4, see.megatron),
    "num_query_groups": Case(2, see.megatron), "kv_channels": Case(16, see.megatron),
    "vocab_size": Case(4096), "max_position_embeddings": Refuses(8),
    "rotary_base": Case(5e5, see.megatron),
    "rope_scaling_type": Case("linear", see.megatron, {"model.small.rope_scaling_factor": 2.0}),
    "rope_scaling_factor": Case(8.0, see.megatron, LLAMA3),
    "low_freq_factor": Case(3.0, see.megatron, LLAMA3),
    "high_freq_factor": Case(9.0, see.megatron, LLAMA3),
    "original_max_position_embeddings": Case(32, see.megatron, LLAMA3),
    "add_qkv_bias": Case(True, see.megatron), "qk_layernorm": Case(True, see.megatron),
    "norm_epsilon": Case(1e-2, see.megatron),
    "untie_embeddings_and_output_weights": Case(True, see.megatron),
    "init_method_std": Case(0.5, see.fresh_head), "num_experts": Case(4, see.megatron),
    "moe_router_topk": Case(3, see.megatron, EXPERTS),
    "moe_ffn_hidden_size": Case(32, see.megatron, EXPERTS),
    "moe_router_pre_softmax": Case(True, see.megatron, EXPERTS),
    "moe_router_load_balancing_type": Case("none", see.megatron, EXPERTS),
    "moe_aux_loss_coeff": Case(0.5, see.megatron, EXPERTS),
}  # fmt: skip
EVERY_ROLE: dict[str, Any] = {
    "model": Case("tiny", base={"model.tiny": {**TREE["model"]["small"], "num_layers": 2}}),
    "load": Case("elsewhere"),
    "trust_files": Shown("weights/test_pickled.py",
     "test_an_old_torch_reads_pickled_files_only_where_they_are_trusted"),
    "backend": Shown("config/test_backends.py",
     "test_the_reference_and_the_rollout_follow_the_actor"),
    "context_parallel_size": Shown("config/test_backends.py",
     "test_a_context_parallel_group_is_one_replica"),
    "tensor_model_parallel_size": Case(2), "pipeline_model_parallel_size": Case(2),
    "num_layers_per_virtual_pipeline_stage": Case(1,
     base={"training.pipeline_model_parallel_size": 2}),
    "expert_model_parallel_size": Case(2, base=EXPERTS),
    "sequence_parallel": Case(True, base={"training.tensor_model_parallel_size": 2,
     "training.micro_batch_size": 12, "actor_rollout.ppo_mini_batch_size": 48,
     "critic.critic_mini_batch_size": 48}),
    "micro_batch_size": Case(2), "max_tokens_per_micro_batch": Case(64), "bf16": Case(True),
    "packed_sequences": Case(False, see.micro_batches),
    "share_prompts": Case(False, see.planned, SHARING),
}  # fmt: skip
OFFLOAD: dict[str, Any] = {"weights": Case(True), "optimizer": Case(True)}
LORA = {"actor_rollout.lora.rank": 4}
LORA_KEYS: dict[str, Any] = {
    "rank": Case(4),
    "alpha": Case(3.0, see.adapted, LORA),
    "target_modules": Case(["gate_proj"], see.adapted, LORA),
    "exclude_modules": Case(["up_proj"], see.adapted, LORA),
}  # fmt: skip
FULL = {"training.recompute": "full"}
LEARNING_KEYS: dict[str, Any] = {
    "save": Case("elsewhere"), "shuffle_minibatch": Case(True, see.orders),
    "balance_by_length": Shown("roles/test_balance.py",
     "test_without_balance_no_call_waits_for_the_responses"),
    "recompute": Case("selective", see.recomputed),
    "recompute_method": Case("block", see.recomputed, FULL),
    "recompute_num_layers": Case(2, see.recomputed, FULL),
}  # fmt: skip
POLICY_KEYS: dict[str, Any] = {
    "fp32_head": Shown("../distributed/test_lora_generation.py",
     "test_an_fp32_head_rounds_no_logits"),
}  # fmt: skip
ACTOR_KEYS: dict[str, Any] = {
    **POLICY_KEYS,
    **LEARNING_KEYS, "do_sample": Case(True), "temperature": Case(0.5, see.loss, SAMPLE),
    "top_k": SAMPLING, "top_p": SAMPLING, "min_new_tokens": SAMPLING, "max_prompt_length": Case(4),
    "max_new_tokens": Case(10),
    "num_gpus_for_train": Case(2, base=SPLIT, also={f"{ACTOR}num_gpus_for_infer": 6}),
    "num_gpus_for_infer": Case(2, base=SPLIT, also={f"{ACTOR}num_gpus_for_train": 6}),
    "stop_token_ids": Case([5], see.prepared), "num_samples_per_step": Case(3),
    "stop_strings": Shown("rollout/test_native.py",
     "test_stop_strings_end_a_response_where_their_last_token_is"),
    "fixed_responses": Case("given.jsonl", see.prepared),
    "n_samples_per_prompt": Case(2, base=SAMPLE), "ppo_mini_batch_size": Case(24),
    "ppo_epochs": Case(2),
    "policy_loss": Case("gspo", see.loss, {"algorithm.loss_normalizer": "minibatch_tokens"}),
    "covariance_fraction": Case(0.5, see.loss, {f"{ACTOR}policy_loss": "kl_cov"}),
    "covariance_kl_coef": Case(5.0, see.loss, {f"{ACTOR}policy_loss": "kl_cov"}),
    "clip_ratio": Case(0.01, see.loss), "clip_ratio_low": Case(0.01, see.loss),
    "clip_ratio_high": Case(0.01, see.loss), "clip_ratio_c": Case(1.01, see.loss),
    "entropy_coeff": Case(0.5, see.loss), "dpo_beta": Case(0.5, see.loss, PAIRS),
    "dpo_loss_type": Case("ipo", see.loss, PAIRS),
}  # fmt: skip
CRITIC_KEYS: dict[str, Any] = {
    **LEARNING_KEYS, "critic_mini_batch_size": Case(24), "critic_update_epochs": Case(2),
    "warmup_iters": Case(1), "cliprange_value": Case(0.1, see.valued),
    "vf_coef": Case(0.5, see.valued), "freeze": Case("attention"), "freeze_after": Case(1),
}  # fmt: skip
REWARD_KEYS: dict[str, Any] = {
    "kind": Case("model", base={"placement.reward": "main"}),
    "rules": Case({"mine": "gsm8k"}, see.scored), "verifier": Case(True),
    "function": Shown(FUNCTIONS, "test_functions_that_exclude_each_other_are_refused"),
    "functions": Shown(FUNCTIONS,
     "test_several_functions_have_names_weights_arguments_and_data_sources"),
    "model_weight": Shown(MODEL_REWARD, "test_scores_of_model_and_functions_are_added"),
    "allow_changed_function": Shown(FUNCTIONS,
     "test_a_changed_text_is_another_run_unless_it_is_allowed"),
    "agent_text": Shown("roles/test_scorer.py",
     "test_functions_read_a_conversation_or_its_last_turn"),
    "processes": Case(3, see.scoring), "timeout_s": Case(3.0, see.scoring),
    "worker_memory_gib": Case(3.0, see.scoring),
    "failed_score": Shown("roles/test_scorer.py", "test_a_failure_is_that_of_one_sample"),
    "max_failed": Shown("roles/test_role_groups.py",
     "test_the_run_stops_where_more_samples_fail_than_may"),
}  # fmt: skip
OF_FUNCTION = Shown(
    FUNCTIONS, "test_several_functions_have_names_weights_arguments_and_data_sources"
)
FUNCTION_KEYS: dict[str, Any] = {
    **dict.fromkeys(("name", "function", "url", "weight", "arguments", "data_sources"),
     OF_FUNCTION),
    "headers": Shown("rewards/test_remote.py",
     "test_a_server_gets_secrets_and_no_failure_shows_them"),
    "sha256": Shown(FUNCTIONS,
     "test_a_function_stands_in_the_configuration_with_its_file_and_hash"),
    "batch_size": Shown("rewards/test_remote.py",
     "test_samples_go_in_batches_and_scores_come_back_in_order"),
}  # fmt: skip
SANDBOX: dict[str, Any] = {
    "unsafe": Case(True, see.sandboxed), "python": Case("/usr/bin/python4", see.sandboxed),
    "cpu_s": Case(1.5, see.sandboxed), "wall_s": Case(1.5, see.sandboxed),
    "response_s": Shown("rewards/test_programs.py", "test_cases_end_with_the_time_of_a_response"),
    "memory_mb": Case(77, see.sandboxed), "file_mb": Case(77, see.sandboxed),
    "files": Case(77, see.sandboxed), "processes": Case(77, see.sandboxed),
    "output_kb": Case(77, see.sandboxed),
}  # fmt: skip
COLUMNS = Shown(PROMPT_KEYS, "test_rows_of_the_usual_columns_are_read_from_parquet")
DATA: dict[str, Any] = {
    "train_files": Case("other.jsonl"), "val_files": Case("val.jsonl"),
    "data_path": Case("prefix", base={"data.train_files": [], "data.data_path": "other"}),
    "val_data_path": Case("prefix"),
    "prompt_key": COLUMNS, "ground_truth_key": COLUMNS, "data_source_key": COLUMNS,
    "default_data_source": Shown(PROMPTS,
     "test_rows_of_several_files_come_in_order_with_all_fields"),
    "extra_columns": COLUMNS,
    "system_prompt": Shown(PROMPT_KEYS, "test_a_system_prompt_comes_first_unless_the_chat_has_one"),
    "template_date": Shown("data/test_template_dates.py",
     "test_a_template_prints_the_day_of_the_configuration"),
    "chat_template_kwargs": Shown(PROMPT_KEYS, "test_chat_template_kwargs_reach_the_template"),
    "train_weights": Shown("trainer/test_prompt_source.py",
     "test_train_weights_are_shares_of_the_files"),
    "invalid_rows": Shown(PROMPT_KEYS, "test_invalid_rows_are_dropped_and_counted_on_request"),
    "overlong_prompts": Shown(PROMPT_KEYS, "test_long_prompts_are_cut_on_the_named_side"),
    "allow_special_tokens": Shown(PROMPTS,
     "test_special_tokens_are_added_but_only_an_eos_of_the_text_stays"),
    "shuffle": Case(False, see.driven),
}  # fmt: skip
VALIDATION_SAMPLING = Shown(
    "roles/test_rollout.py", "test_every_sampling_key_of_validation_reaches_its_generation"
)
VALIDATION: dict[str, Any] = {
    "interval": Case(2, see.validated, {"data.val_files": "val.jsonl"}),
    "before": Case(False, see.validated), "after": Case(False, see.validated),
    "max_samples": Case(3, see.prepared),
    "n_samples": Case(4, see.measured, {"validation.do_sample": True}),
    "do_sample": Case(True, base={"data.val_files": "val.jsonl"}),
    "temperature": Case(0.5, base={"data.val_files": "val.jsonl", "validation.do_sample": True}),
    "top_k": VALIDATION_SAMPLING, "top_p": VALIDATION_SAMPLING,
    "reward": Case("model", see.measured, REWARD_MODEL), "pass_score": Case(0.9, see.measured),
    "best_metric": Case("mean@1", see.compared),
    "only": Shown("trainer/test_run.py", "test_validation_only_trains_nothing"),
    "checkpoint": Shown(CHECKPOINTS,
     "test_validation_alone_reads_the_chosen_checkpoint_or_names_those_there_are"),
}  # fmt: skip
LOGGING: dict[str, Any] = {
    "samples": Case(5, see.recorded), "sample_tokens": Case(False, see.recorded),
    "console": Shown(CONSOLE, "test_the_mode_chooses_what_is_shown"),
    "console_metrics": Case(["critic/kl"], see.recorded),
    "stop_on": Shown(RECORDER, "test_the_first_illness_of_stop_on_is_returned"),
    "trackers": Shown(RECORDER, "test_a_tracker_gets_project_mode_and_metrics"),
    "tracker_project": Shown(RECORDER, "test_a_tracker_gets_project_mode_and_metrics"),
    "tracker_mode": Shown(RECORDER, "test_a_tracker_gets_project_mode_and_metrics"),
    "reference_kl": Case(True, base={"algorithm.kl_ctrl.kl_coef": 0.0}),
}  # fmt: skip
DEVICE: dict[str, Any] = {
    "kind": Case("cuda", base=JOINED), "resource_name": Case("mine", see.started),
    "devices_per_node": Case(4, base=JOINED), "memory_gib": Case(7.0),
    "cpu_threads": Case(3, see.started),
}  # fmt: skip
POOL_SETTINGS: dict[str, Any] = {
    "wait_s": Case(7.0, see.joined), "env": Case({"A": "b"}),
    "bad_nodes": Case("exclude", see.joined),
    "tensor_parallel_spans_nodes": Refuses(True,
     base={**TWO_NODES, "training.tensor_model_parallel_size": 8}),
}  # fmt: skip
RUNTIME: dict[str, Any] = {
    "kind": Case("local", base={"resource_pool.main": 1}), "address": Case("head:6379"),
    "timeout_s": Case(7.0, see.joined), "start_timeout_s": Case(7.0, see.joined),
}  # fmt: skip
ON_NPU = {**JOINED, "device.kind": "npu", "device.memory_gib": 64}
PLAN: dict[str, Any] = {
    "suggest": Case(True, base=ON_NPU), "host_memory_gib": Case(0.25, base=ON_NPU),
    "disk_gib": Case(0.25, base=ON_NPU), "mfu": Case(0.5, base={"plan.peak_tflops": 989}),
    "peak_tflops": Case(313),
}  # fmt: skip
STALE = {"rollout.max_staleness": 2}
ROLLOUT = {
    "engine": Shown("trainer/test_bad_files.py",
     "test_an_unknown_or_unsuitable_rollout_engine_is_refused"),
    "tensor_model_parallel_size": Case(2, base=SPLIT),
    "expert_model_parallel_size": Case(2, base={**SPLIT, **EXPERTS}),
    "first_rank_draws": Shown("../distributed/test_rollout_engine.py",
      "test_the_first_rank_alone_gets_logits_and_draws_the_same"),
    "decode_graphs": Shown("rollout/test_decode_graphs.py",
      "test_graphs_sample_what_steps_without_them_sample"),
    "max_staleness": Case(1), "slice_steps": Case(16, base=STALE),
    "slice_s": Shown("../vllm/test_client.py",
     "test_a_slice_that_takes_too_long_ends_with_the_tokens_that_come_next"),
    "lead": Case(1, base=STALE),
    "agent": Shown(CONVERSATIONS,
     "test_samples_without_an_agent_are_generated_beside_conversations"),
    "agent_lag": Shown(CONVERSATIONS,
     "test_delays_of_agents_change_neither_rows_nor_slices"),
    "max_turns": Shown(CONVERSATIONS, "test_the_configuration_ends_conversations"),
    "tools": Shown(TOOLS, "test_calls_return_what_the_model_reads"),
    "tool_processes": Shown(TOOLS, "test_a_tool_that_ends_or_hangs_is_a_message"),
    "max_tool_response_length": Shown(TOOLS, "test_a_long_result_loses_its_middle"),
    "turn_timeout_s": Shown(CONVERSATIONS, "test_the_configuration_ends_conversations"),
    "program": Shown(PROGRAMS,
     "test_a_program_leads_the_conversations_of_an_agent_in_the_process"),
    "program_processes": Shown(PROGRAMS,
     "test_fewer_processes_than_samples_lead_them_in_the_order_of_the_stream"),
    "gateway": Shown(CONVERSATIONS, "test_an_agent_opens_an_endpoint_where_the_run_has_a_gateway"),
    "gateway_host": Shown(CONVERSATIONS,
     "test_an_agent_opens_an_endpoint_where_the_run_has_a_gateway"),
}  # fmt: skip
PROGRAM_KEYS = {
    "run": Shown(PROGRAMS, "test_a_command_reads_its_row_and_gives_its_reward"),
    "folder": Shown(PROGRAMS, "test_a_command_reads_its_row_and_gives_its_reward"),
    "sha256": Shown(PROGRAMS, "test_a_function_stands_with_its_file_and_its_hash"),
}
TOOL_KEYS = dict.fromkeys(
    ("function", "sha256"), Shown(TOOLS, "test_a_tool_stands_with_its_file_and_its_hash")
)
SERVED = {"rollout.engine": "vllm"}
VLLM = {
    "python": Case("/elsewhere/python", see.served, SERVED),
    "tensor_parallel_size": Case(2, see.served, SERVED),
    "max_num_seqs": Case(9, see.served, SERVED),
    "gpu_memory_utilization": Case(0.9, see.served, SERVED),
    "kv_cache_gib": Case(3.0, see.served, SERVED),
    "enforce_eager": Case(False, see.served, SERVED),
    "extra_args": Case({"block_size": 32}, see.served, SERVED),
}
ONE_VALUE = {"tokenizer_type", "dropout"}
"""Reviewed: keys of which one value alone is accepted, which asks for what happens anyway."""

TABLE: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "training": (TrainingConfig, TRAINING), "algorithm": (AlgorithmConfig, ALGORITHM),
    "algorithm.kl_ctrl": (KlControlConfig, KL_CTRL),
    "rollout": (PLAIN_SECTIONS["rollout"], ROLLOUT), "rollout.vllm": (VllmConfig, VLLM),
    "rollout.tools": (ToolConfig, TOOL_KEYS), "rollout.program": (ProgramConfig, PROGRAM_KEYS),
    "reward.function": (FunctionConfig, FUNCTION_KEYS), "reward.sandbox": (SandboxConfig, SANDBOX),
    "data": (PLAIN_SECTIONS["data"], DATA),
    "validation": (PLAIN_SECTIONS["validation"], VALIDATION),
    "logging": (PLAIN_SECTIONS["logging"], LOGGING), "device": (PLAIN_SECTIONS["device"], DEVICE),
    "runtime": (PLAIN_SECTIONS["runtime"], RUNTIME), "plan": (PLAIN_SECTIONS["plan"], PLAN),
    "resource_pool": (PoolSettings, POOL_SETTINGS),
    "model.small": (ArchitectureConfig, ARCHITECTURE),
    "actor_rollout.offload": (OffloadConfig, OFFLOAD),
    "actor_rollout.lora": (LoraConfig, LORA_KEYS),
    **{role.value: (schema, {"actor_rollout": ACTOR_KEYS, "critic": CRITIC_KEYS,
     "reward": REWARD_KEYS, "ref": POLICY_KEYS}[role.value])
     for role, schema in ROLE_SECTIONS.items()},
}  # fmt: skip
NOT_LEAVES = {"kl_ctrl", "architecture", "sandbox", "offload", "vllm", "lora"}


def cases_of(section: str) -> dict[str, Any]:
    """Return the case of each key."""
    of_roles = EVERY_ROLE | (OPTIMIZER if section == "actor_rollout" else {})
    return {**TABLE[section][1], **(of_roles if section in ROLES else {})}


@pytest.mark.parametrize("section", TABLE)
def test_every_key_of_the_schema_has_a_case(section):
    schema, table = TABLE[section]
    inherited = {*RoleConfig.model_fields, *OptimizerConfig.model_fields}
    inherited = inherited if section in ROLES else set()
    parts = set() if schema is OffloadConfig else NOT_LEAVES
    assert set(table) == set(schema.model_fields) - inherited - parts - ONE_VALUE
    if section in ROLES:
        assert set(EVERY_ROLE) == set(RoleConfig.model_fields) - NOT_LEAVES
        assert set(OPTIMIZER) == set(OptimizerConfig.model_fields)


@pytest.mark.parametrize("section", TABLE)
def test_a_key_changes_what_its_observer_returns(make_tree, section):
    cases = cases_of(section)
    unseen = [key for key, case in cases.items() if not is_seen(make_tree, section, key, case)]
    assert unseen == [], "a key without effect, or without the test that shows it"


def is_seen(make_tree: MakeTree, section: str, key: str, case: Case | Shown) -> bool:
    if isinstance(case, Shown):
        text = (ROOT / "tests" / "unit" / case.file).read_text(encoding="utf-8")
        return f"def {case.test}(" in text and key in text
    base = dict(case.base)
    if section == "reward" and key in EVERY_ROLE:
        base = {**REWARD_MODEL, **base}
    drop = () if base.get("training.stage") is None else ("critic", "placement.critic")
    before = seen(make_tree, base, drop, case)
    changed = {**base, **case.also, f"{section}.{key}": case.value}
    after = seen(make_tree, changed, drop, case)
    return str(before) != str(after)


def seen(make_tree: MakeTree, changes: Changes, drop: tuple[str, ...], case: Case) -> Any:
    """What the observer sees; an error where there is nothing to see."""
    tree = json.dumps(make_tree(changes, drop))
    try:
        return _seen(tree, case.see)
    except ConfigError as error:
        if isinstance(case, Refuses):
            return error
        raise


@functools.cache
def _seen(tree: str, observe: see.Observer) -> Any:
    return observe(resolve(json.loads(tree), "test"))
