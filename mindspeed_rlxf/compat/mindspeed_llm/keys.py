"""MindSpeed-LLM's keys without a counterpart here, and how each is treated.

Each key is in exactly one place: the schema, `translate.MOVED`, NO_OPS or REFUSED. All other
keys are unknown.
"""

from dataclasses import dataclass
from typing import Any

ANY = "any value"


@dataclass(frozen=True)
class NoOp:
    """Keys accepted without effect, for values matching the behaviour here.

    Attributes:
        keys: Their names.
        allowed: Accepted values; ANY = every number, text, true, false and null.
        meaning: Behaviour here, printed as a note with `key=value`.
        remedy: What to use for other values; None = the first two in `allowed`.
    """

    keys: tuple[str, ...]
    allowed: tuple[Any, ...] | str
    meaning: str
    remedy: str | None = None


@dataclass(frozen=True)
class Refusal:
    """Keys asking for missing features.

    Attributes:
        keys: Their names.
        why: The rule, printed as an error.
        remedy: Hint for a fix.
        neutral: Values besides false and null which do not ask for the feature and are ignored.
    """

    keys: tuple[str, ...]
    why: str
    remedy: str = "remove it"
    neutral: tuple[Any, ...] = ()


def allows(allowed: tuple[Any, ...] | str, value: Any) -> bool:
    """Return whether a value is in `allowed`; true is not 1, but 0 is 0.0.

    ANY allows scalars and null, but no lists and dicts.
    """
    if isinstance(allowed, str):
        return value is None or isinstance(value, (bool, int, float, str))
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in allowed)


YES, NO = (True,), (False,)
BOTH = (True, False)
ARCHITECTURE = "the architecture of every model here"
KERNELS = "the device chooses the kernels, the numbers mean the same"

NO_OP_LIST = (
    NoOp(("context_parallel_algo",), ("ulysses_cp_algo",),
        "context parallelism is Ulysses: its ranks exchange tokens for heads inside attention",
        "ulysses_cp_algo; ring and hybrid attention, which send keys around, are not implemented"),
    NoOp(("kv_head_repeat_before_uly_alltoall",), BOTH,
        "key-value heads are repeated where there are fewer than ranks"),
    NoOp(("use_mcore_models",), YES, "models are always Megatron-core's"),
    NoOp(("use_flash_attn", "use_fused_rmsnorm", "use_fused_swiglu", "use_fused_rotary_pos_emb",
        "use_mc2", "no_masked_softmax_fusion", "no_gradient_accumulation_fusion",
        "no_bias_gelu_fusion", "no_bias_swiglu_fusion", "no_bias_dropout_fusion", "no_rope_fusion",
        "jit_compile"), BOTH, KERNELS),
    NoOp(("async_log_allreduce",), BOTH, "metrics are summed once per optimizer step"),
    NoOp(("use_rotary_position_embeddings", "swiglu", "disable_bias_linear"), YES, ARCHITECTURE),
    NoOp(("position_embedding_type",), ("rope",), ARCHITECTURE),
    NoOp(("normalization",), ("RMSNorm",), ARCHITECTURE),
    NoOp(("rotary_percent",), (1.0,), ARCHITECTURE),
    NoOp(("attention_dropout", "hidden_dropout"), (0.0,),
        "there is no dropout: the ratio of new to old probabilities would be noise"),
    NoOp(("attention_softmax_in_fp32",), YES, "attention's softmax sums in fp32"),
    NoOp(("make_vocab_size_divisible_by",), (1,),
        "the vocabulary has the rows that vocab_size (or padded_vocab_size) says",
        "1, and padded_vocab_size for rows that are padded"),
    NoOp(("no_shared_storage",), BOTH,
        "there is no index cache of data sets; nodes share output_dir"),
    NoOp(("distributed_backend",), ANY, "device.kind decides the backend of process groups"),
    NoOp(("no_load_optim", "no_load_rng"), YES, "`load` gives only the initial weights",
        "true; false would resume from the folder of `load`, which only a run directory can"),
    NoOp(("finetune",), YES, "a run starts at iteration 0 from the weights of `load`",
        "true; false would go on at the iteration of the folder of `load`"),
    NoOp(("no_save_optim", "no_save_rng"), YES,
        "final weights are written without them; a checkpoint of the run always has optimizer and"
        " random state", "true; final weights have no optimizer beside them"),
    NoOp(("is_instruction_dataset",), YES, "prompts are read by the names of their columns"),
    NoOp(("variable_seq_lengths",), YES, "lengths always vary: nothing is padded to seq_length"),
    NoOp(("shuffle",), NO,
        "prompts: data.shuffle (or no_shuffle); samples of a batch: shuffle_minibatch",
        "false, and data.shuffle or shuffle_minibatch"),
    NoOp(("use_kv_cache",), BOTH, "generation always keeps keys and values"),
    NoOp(("initial_loss_scale",), ANY, "losses are scaled for fp16 only, which is not supported"),
    NoOp(("pad_to_multiple_of",), ANY, "nothing is padded"),
    NoOp(("max_tokens_to_oom",), ANY,
        "there is no such limit; dry_run=true says before the start whether the batch fits"),
    NoOp(("md5_validate",), NO, "weights of generation and training are compared by their results",
        "false, and algorithm.max_log_prob_gap, which stops where generation and training differ"),
    NoOp(("rollout_batch_size",), ANY,
        "read by stage trl_ppo only: training.global_batch_size counts prompts here"),
    NoOp(("split",), ("100,0,0", "100,0", "100", 100, "1,0,0", "1", 1, "1.0,0.0,0.0"),
        "all prompts of data_path are trained on",
        "100,0,0, and data.val_files or data.val_data_path for validation"),
    NoOp(("extract_content_for_reward",), NO, "the reward model sees the whole response",
        "false; the text between <answer> tags cannot be scored alone"),
    NoOp(("log_interval",), ANY, "every iteration is logged"),
    NoOp(("log_throughput", "log_timers_to_tensorboard"), BOTH, "metrics.jsonl holds all metrics"),
    NoOp(("distributed_timeout_minutes",), ANY,
        "runtime.timeout_s is the longest wait for one call"),
    NoOp(("num_workers",), ANY, "prompts are held in memory, no process loads them"),
)  # fmt: skip
"""Keys in `model.<name>`, `training` and role sections."""

NO_OPS: dict[str, NoOp] = {key: entry for entry in NO_OP_LIST for key in entry.keys}

REFUSED_LIST = (
    Refusal(("ulysses_degree_in_cp", "cp_window_size", "attention_mask_type",
        "cp_attention_mask_type", "use_cp_send_recv_overlap"),
        "they set up ring or hybrid attention, and context parallelism is Ulysses here"),
    Refusal(("lora_r", "lora_alpha", "lora_target_modules", "lora_load", "lora_modules_to_save",
        "lora_register_forward_hook", "lora_fusion", "lora_ckpt_filter", "qlora",
        "qlora_save_dequantize"), "adapters have PEFT's terms here, in the section lora",
        "use lora.rank, lora.alpha and lora.target_modules (q_proj, ...), or remove it"),
    Refusal(("fp16",), "half precision is bf16 here, which needs no loss scale", "use bf16: true"),
    Refusal(("fp8_format", "fp8", "params_dtype"), "precision is bf16 or fp32", "use bf16"),
    Refusal(("loss_scale", "min_loss_scale", "loss_scale_window"), "losses are not scaled"),
    Refusal(("recompute_activation_function", "recompute_activation_function_num_layers",
        "recompute_in_advance", "recompute_norm", "recompute_norm_num_layers",
        "enable_recompute_layers_per_pp_rank"),
        "norms with activation functions, MLPs, or whole layers are recomputed",
        "use recompute=elementwise or selective, or recompute=full with recompute_method and "
        "recompute_num_layers"),
    Refusal(("swap_attention", "swap_modules", "swap_optimizer", "swap_optimizer_times",
        "reuse_fp32_param", "o2_optimizer", "o2_gradient"),
        "nothing is moved to the host's memory within a step",
        "use use_distributed_optimizer or more devices, or offload.weights and offload.optimizer,"
        " which move a role away while other roles of its devices compute; remove it"),
    Refusal(("num_layer_list", "noop_layers", "schedules_method",
        "virtual_pipeline_model_parallel_size"), "pipeline stages have equal numbers of layers",
        "use pipeline_model_parallel_size and num_layers_per_virtual_pipeline_stage"),
    Refusal(("tp_2d", "tp_x", "tp_y", "use_nd_matmul"), "tensor parallel has one dimension"),
    Refusal(("optimizer",), "the optimizer is Adam with decoupled weight decay", "use adam",
        ("adam",)),
    Refusal(("lr_warmup_iters", "lr_warmup_samples", "lr_decay_iters", "lr_decay_samples",
        "lr_warmup_init"), "a schedule spans train_iters",
        "use lr_warmup_fraction and lr_decay_style"),
    Refusal(("weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
        "weight decay is constant", "use weight_decay", ("constant",)),
    Refusal(("rampup_batch_size",), "the batch size is constant", "use global_batch_size"),
    Refusal(("train_samples",), "a run counts iterations", "use training.train_iters"),
    Refusal(("eval_iters", "eval_interval"), "validation has a section of its own",
        "use validation.interval", (0,)),
    Refusal(("tokenizer_kwargs", "tokenizer_not_use_fast", "tokenizer_padding_side",
        "tokenizer_model", "vocab_file", "merge_file"),
        "the tokenizer is the Hugging Face folder as it is", "use training.tokenizer_name_or_path"),
    Refusal(("prompt_type", "prompt_type_path", "hf_chat_template"),
        "templates are applied by preprocess_data.py, whose stop tokens end responses",
        "give it to preprocess_data.py, and remove it here"),
    Refusal(("pretrained_checkpoint", "load_checkpoint_loosely", "ckpt_format", "ckpt_step",
        "use_checkpoint_args", "use_mp_args_from_checkpoint_args"),
        "weights start from the folder that `load` names, and have to fit", "use load"),
    Refusal(("add_dense_bias", "add_output_layer_bias", "add_rmsnorm_offset", "geglu", "gelu_tanh",
        "post_norm", "embed_layernorm", "input_embeds_norm", "scale_emb", "scale_depth",
        "dim_model_base", "output_logit_softcapping", "attn_logit_softcapping",
        "query_pre_attn_scalar", "sliding_window", "interleave_sliding_window", "use_glm_rope",
        "multi_head_latent_attention", "multi_latent_attention", "squared_relu",
        "alibi_fusion_attn_type", "square_alibi_mask", "no_post_layer_norm",
        "embedding_multiplier_scale", "output_multiplier_scale", "mtp_num_layers",
        "cla_share_factor", "share_kvstates"),
        "no model here has it (families: Llama, Qwen2, Qwen3, Qwen3-MoE, Mixtral)",
        "use a model of these families"),
    Refusal(("n_shared_experts", "first_k_dense_replace", "moe_layer_freq", "moe_tp_extend_ep",
        "moe_train_capacity_factor", "moe_expert_capacity_factor", "noisy_gate_policy"),
        "experts are those of Qwen3-MoE and Mixtral: one mixture in every layer, no capacity"),
    Refusal(("moe_grouped_gemm", "moe_permutation_async_comm", "moe_token_dispatcher_type",
        "moe_alltoall_overlap_comm", "moe_allgather_overlap_comm", "moe_zero_memory"),
        "the computation of experts and the exchange of their tokens cannot be configured here"),
    Refusal(("moe_intermediate_size",), "the name is Megatron's", "use moe_ffn_hidden_size"),
    Refusal(("reward_model", "ref_model", "max_length"), "it belongs to stage trl_ppo",
        "use the sections reward and ref, and training.seq_length"),
    Refusal(("tensorboard_dir", "wandb_project", "wandb_exp_name"),
        "trackers have keys of their own",
        "set logging.trackers, as [tensorboard] or [wandb], and logging.tracker_project"),
)  # fmt: skip
"""Keys in `model.<name>`, `training` and role sections."""

REFUSED: dict[str, Refusal] = {key: entry for entry in REFUSED_LIST for key in entry.keys}
