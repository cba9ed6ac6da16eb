"""Sections of the roles: architecture, optimizer, layout and what each role does."""

from __future__ import annotations

from typing import Annotated

from mindspeed_rlxf.config.enums import (
    DpoLoss,
    LoadBalancing,
    LrDecayStyle,
    PolicyLoss,
    RewardKind,
    RopeScaling,
)
from mindspeed_rlxf.config.fields import Integers, Section, Word, key


class ArchitectureConfig(Section):
    """A decoder of the Llama, Qwen or Mixtral family, in Megatron's names; `model.<name>` in the
    YAML. With `num_experts` the MLP of every layer is a mixture of experts."""

    num_layers: int = key(..., "transformer layers", ge=1)
    hidden_size: int = key(..., "width of the residual stream", ge=1)
    ffn_hidden_size: int = key(..., "width of the gated MLP", ge=1)
    num_attention_heads: int = key(..., "query heads", ge=1)
    num_query_groups: int | None = key(None, "key and value heads; null = one per query head", ge=1)
    kv_channels: int | None = key(None, "width of a head; null = hidden_size / heads", ge=1)
    vocab_size: int = key(..., "tokens of the checkpoint's embedding", ge=1)
    max_position_embeddings: int = key(..., "longest sequence, tokens", ge=1)
    rotary_base: float = key(10000.0, "rotary base frequency", gt=0)
    rope_scaling_type: Annotated[RopeScaling | None, Word] = key(None, "rotary scaling; null = off")
    rope_scaling_factor: float = key(1.0, "how far rotary positions are stretched", ge=1)
    low_freq_factor: float = key(1.0, "llama3 scaling: low frequency bound", gt=0)
    high_freq_factor: float = key(4.0, "llama3 scaling: high frequency bound", gt=0)
    original_max_position_embeddings: int | None = key(
        None, "llama3 scaling: longest sequence before stretching, tokens", ge=1
    )
    add_qkv_bias: bool = key(False, "query, key and value projections have a bias (Qwen2)")
    qk_layernorm: bool = key(False, "queries and keys of each head are normed (Qwen3)")
    norm_epsilon: float = key(1e-5, "RMSNorm epsilon", gt=0)
    untie_embeddings_and_output_weights: bool = key(False, "output layer has its own weights")
    init_method_std: float = key(0.02, "standard deviation of new weights", gt=0)
    num_experts: int | None = key(None, "experts of each layer; null = one dense MLP", ge=2)
    moe_router_topk: int = key(2, "experts that compute a token", ge=1)
    moe_ffn_hidden_size: int | None = key(None, "width of one expert; null = ffn_hidden_size", ge=1)
    moe_router_pre_softmax: bool = key(
        False, "weights of the chosen experts sum to less than 1 (norm_topk_prob: false)"
    )
    moe_router_load_balancing_type: Annotated[LoadBalancing, Word] = key(
        LoadBalancing.AUX_LOSS, "aux_loss or none", "free"
    )
    moe_aux_loss_coeff: float = key(0.0, "weight of the load-balancing loss", "free", ge=0)

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def mlp_hidden_size(self) -> int:
        """Width of a layer's MLP, or of one expert."""
        return (self.num_experts and self.moe_ffn_hidden_size) or self.ffn_hidden_size

    @property
    def balances_experts(self) -> bool:
        """Training adds the load-balancing loss."""
        wanted = self.moe_router_load_balancing_type is LoadBalancing.AUX_LOSS
        return self.num_experts is not None and wanted and self.moe_aux_loss_coeff > 0


class OptimizerConfig(Section):
    """Adam and its learning-rate schedule, which advances once per iteration."""

    lr: float = key(1e-6, "highest learning rate", "free", ge=0)
    min_lr: float = key(0.0, "learning rate at the end of decay", "free", ge=0)
    lr_decay_style: Annotated[LrDecayStyle, Word] = key(LrDecayStyle.CONSTANT, "decay", "free")
    lr_warmup_fraction: float = key(0.0, "share of train_iters to warm up in", "free", ge=0, lt=1)
    weight_decay: float = key(0.0, "decoupled weight decay", "free", ge=0)
    adam_beta1: float = key(0.9, "decay of the first moment", "free", ge=0, lt=1)
    adam_beta2: float = key(0.999, "decay of the second moment", "free", ge=0, lt=1)
    adam_eps: float = key(1e-8, "added to the root of the second moment", "free", gt=0)
    clip_grad: float = key(1.0, "largest gradient norm; 0 = no clipping", "free", ge=0)
    use_distributed_optimizer: bool = key(False, "shard optimizer state over DP", "reshard")


class RoleConfig(Section):
    """What every role with a model has."""

    model: str = key(..., "name of the architecture in the model section")
    architecture: ArchitectureConfig = key(..., "architecture, the role's own keys laid over it")
    load: str | None = key(
        None, "folder the weights start from, Hugging Face's or Megatron's", "free"
    )
    tensor_model_parallel_size: int = key(1, "ranks that share a layer", "reshard", ge=1)
    pipeline_model_parallel_size: int = key(1, "ranks that share the layers", "reshard", ge=1)
    num_layers_per_virtual_pipeline_stage: int | None = key(
        None, "layers of a chunk; a rank holds several (interleaved); null = one", "reshard", ge=1
    )
    expert_model_parallel_size: int = key(
        1, "data-parallel ranks that share the experts of a layer", "reshard", ge=1
    )
    sequence_parallel: bool = key(False, "shard norms by token; no effect with TP 1", "reshard")
    micro_batch_size: int = key(1, "samples per forward on one rank", "free", ge=1)
    max_tokens_per_micro_batch: int | None = key(
        None, "tokens per forward on one rank, in place of micro_batch_size", "free", ge=1
    )
    bf16: bool = key(False, "weights and activations in bfloat16")
    packed_sequences: bool = key(True, "no padding in forward and backward", "free")

    @property
    def model_chunks(self) -> int:
        """Runs of consecutive layers that a pipeline rank holds; several = virtual pipeline."""
        per_chunk = self.num_layers_per_virtual_pipeline_stage
        if per_chunk is None:
            return 1
        return self.architecture.num_layers // (self.pipeline_model_parallel_size * per_chunk)

    @property
    def micro_batch_multiple(self) -> int:
        """What the interleaved schedule wants the number of micro-batches to be a multiple of."""
        return self.pipeline_model_parallel_size if self.model_chunks > 1 else 1


class ActorConfig(RoleConfig):
    """The policy: generation and training."""

    optimizer: OptimizerConfig = key(..., "optimizer of the policy")
    save: str | None = key(
        None, "folder of the trained weights; null = final/ in the run directory", "free"
    )
    do_sample: bool = key(False, "sample; false = greedy")
    temperature: float = key(1.0, "divides the logits; used only when sampling", gt=0)
    top_k: int = key(0, "sample among this many; 0 = all", ge=0)
    top_p: float = key(1.0, "sample among tokens of this total probability", gt=0, le=1)
    min_new_tokens: int = key(0, "shortest response, tokens", ge=0)
    max_prompt_length: int = key(512, "longest prompt, tokens", ge=1)
    max_new_tokens: int = key(
        ..., "longest response, tokens; absent = seq_length - max_prompt_length", ge=1
    )
    num_gpus_for_train: int | None = key(
        None,
        "first devices of the pool, which train; null = all do both",
        "reshard",
        ge=1,
    )
    num_gpus_for_infer: int | None = key(
        None, "the pool's other devices, which generate; null = all do both", "reshard", ge=1
    )
    stop_token_ids: Integers = key((), "token ids that end a response besides EOS")
    num_samples_per_step: int | None = key(
        None, "rows generated at once on one rank; null = as many as the cache holds", "free", ge=1
    )
    fixed_responses: str | None = key(
        None, "jsonl file of responses that are taken in place of generated ones"
    )
    n_samples_per_prompt: int = key(
        1, "responses per prompt; absent = 1, or 2 in stage ray_online_dpo", ge=1
    )
    ppo_mini_batch_size: int = key(1, "samples per optimizer step over all DP ranks", ge=1)
    ppo_epochs: int = key(1, "passes over the samples of an iteration", ge=1)
    policy_loss: Annotated[PolicyLoss, Word] = key(
        PolicyLoss.PPO, "ratio of each token (ppo) or of each response (gspo)"
    )
    clip_ratio: float = key(0.2, "policy clip", ge=0)
    clip_ratio_low: float | None = key(
        None, "clip below 1; null = clip_ratio, or 0.0003 for gspo without clip_ratio", ge=0
    )
    clip_ratio_high: float | None = key(
        None, "clip above 1; null = clip_ratio, or 0.0004 for gspo without clip_ratio", ge=0
    )
    clip_ratio_c: float | None = key(None, "dual clip of negative advantages; null = off", gt=1)
    entropy_coeff: float = key(0.0, "weight of the entropy bonus", ge=0)
    dpo_beta: float = key(0.1, "stage ray_online_dpo: weight of the log-ratio", gt=0)
    dpo_loss_type: Annotated[DpoLoss, Word] = key(
        DpoLoss.SIGMOID, "stage ray_online_dpo: loss of a pair"
    )
    shuffle_minibatch: bool = key(False, "shuffle samples before they are cut in mini-batches")

    @property
    def logit_temperature(self) -> float:
        """What logits are divided by: greedy decoding leaves them alone, in generation and in
        training alike."""
        return self.temperature if self.do_sample else 1.0


class RefConfig(RoleConfig):
    """The frozen policy that the KL penalty is measured against."""

    load: str | None = key(None, "folder of the frozen weights, Hugging Face's or Megatron's")


class CriticConfig(RoleConfig):
    """The value model."""

    optimizer: OptimizerConfig = key(..., "optimizer of the critic")
    save: str | None = key(
        None, "folder of the trained weights; null = final/ in the run directory", "free"
    )
    critic_mini_batch_size: int = key(1, "samples per optimizer step over all DP ranks", ge=1)
    critic_update_epochs: int = key(1, "passes over the samples of an iteration", ge=1)
    cliprange_value: float | None = key(3.0, "value clip; null = none", gt=0)
    vf_coef: float = key(1.0, "weight of the value loss", ge=0)
    shuffle_minibatch: bool = key(False, "shuffle samples before they are cut in mini-batches")


class RewardConfig(RoleConfig):
    """What scores responses; a rule needs no model and computes on the CPU."""

    load: str | None = key(None, "folder of the reward model, Hugging Face's or Megatron's")
    kind: Annotated[RewardKind, Word] = key(RewardKind.MODEL, "reward model or rules")
    model: str | None = key(None, "name of the architecture; none for a rule")  # type: ignore[assignment]
    architecture: ArchitectureConfig | None = key(None, "none for a rule")  # type: ignore[assignment]
    rules: dict[str, str] = key({}, "data source -> rule, added to the built-in table")
    verifier: bool = key(
        False, "score every prompt by algorithm.verifier_function; kind is rule then"
    )
