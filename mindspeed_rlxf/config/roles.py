"""Role sections: model, optimizer, parallel layout, batches and generation."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mindspeed_rlxf.config.architecture import ArchitectureConfig, find_uneven, whole_groups
from mindspeed_rlxf.config.enums import Recompute
from mindspeed_rlxf.config.fields import (
    DPO,
    NOT_DPO,
    FilePath,
    Integers,
    Section,
    Word,
    free,
    key,
    reshard,
)
from mindspeed_rlxf.config.lora import LoraConfig, linear_modules
from mindspeed_rlxf.config.problems import (
    Problem,
    at_most,
    divides,
    divisors,
    neighbours,
    ref,
    use,
)
from mindspeed_rlxf.config.registry import Choice

TP = "tensor_model_parallel_size"
PIPELINE = "pipeline_model_parallel_size"
CP = "context_parallel_size"
CHUNK = "num_layers_per_virtual_pipeline_stage"


class OptimizerConfig(Section):
    """Adam and its learning-rate schedule, which advances once per iteration."""

    lr: float = free(1e-6, "highest learning rate", ge=0)
    min_lr: float = free(
        0.0, "learning rate at the end of decay", ge=0, used_if="lr_decay_style!=constant"
    )
    lr_decay_style: Literal["constant", "linear", "cosine"] = free("constant", "decay")
    lr_warmup_fraction: float = free(0.0, "fraction of train_iters to warm up in", ge=0, lt=1)
    weight_decay: float = free(0.0, "decoupled weight decay", ge=0)
    adam_beta1: float = free(0.9, "decay of the first moment", ge=0, lt=1)
    adam_beta2: float = free(0.999, "decay of the second moment", ge=0, lt=1)
    adam_eps: float = free(1e-8, "added to the root of the second moment", gt=0)
    clip_grad: float = free(1.0, "largest gradient norm; 0 = no clipping", ge=0)
    use_distributed_optimizer: bool = reshard(
        False, "shard optimizer state over DP", used_if="backend=megatron"
    )
    overlap_grad_reduce: bool = free(
        False,
        "reduce gradients over DP while the backward pass runs; no use on CPU; off until devices "
        "have shown that both ways agree",
        used_if="backend=megatron",
    )
    overlap_param_gather: bool = free(
        False,
        "gather weights while the next forward pass of an iteration runs; needs "
        "use_distributed_optimizer and overlap_grad_reduce; no use on CPU; off as that one",
        used_if="use_distributed_optimizer; overlap_grad_reduce; backend=megatron",
    )

    reduce_each_micro_batch: bool = free(
        False,
        "sum gradients over the ranks behind each micro-batch's backward pass, not after the last: "
        "a rank then has its shard of them alone; off until a device has measured both",
        used_if="backend=fsdp",
    )

    @property
    def gathers_ahead(self) -> bool:
        """Whether forward passes gather the weights changed by the last optimizer step."""
        sharded = self.use_distributed_optimizer and self.overlap_grad_reduce
        return self.overlap_param_gather and sharded

    def _broken_rules(self) -> Iterator[Problem]:
        # Megatron asserts it for a constant rate too.
        yield from at_most("min_lr", self.min_lr, f"{ref('lr')}={self.lr:g}", self.lr)


class OffloadConfig(Section):
    """Parts held in host memory while other roles compute on the same devices."""

    weights: bool = free(False, "weights are on the host outside of the role's phases")
    optimizer: bool = free(
        False, "optimizer state is on the host outside of updates, and gradients are freed"
    )


class RoleConfig(Section):
    """Keys for every role with a model."""

    model: str = key(..., "name of the architecture in the model section")
    architecture: ArchitectureConfig = key(..., "architecture, the role's own keys laid over it")
    load: FilePath | None = free(
        None, "folder of the initial weights, Hugging Face's or Megatron's"
    )
    backend: Choice = key(
        "megatron",
        "training engine: megatron, fsdp (torch's sharded data parallelism over a model of "
        "transformers), or a plugin's",
    )
    trust_files: bool = free(
        False, "also read pickled weights with torch before 2.10, which they can make run code"
    )
    tensor_model_parallel_size: int = reshard(1, "ranks that share a layer", ge=1)
    pipeline_model_parallel_size: int = reshard(1, "ranks that share the layers", ge=1)
    num_layers_per_virtual_pipeline_stage: int | None = reshard(
        None,
        "layers of a chunk, if a rank has several chunks (interleaved); null = one chunk",
        ge=1,
        only_if="pipeline_model_parallel_size>1",
    )
    expert_model_parallel_size: int = reshard(
        1,
        "data- and context-parallel ranks that share the experts of a layer",
        ge=1,
        only_if="architecture.num_experts",
    )
    context_parallel_size: int = reshard(
        1,
        "ranks that share the tokens of a micro-batch, and the heads inside attention (Ulysses)",
        ge=1,
    )
    sequence_parallel: bool = reshard(
        False,
        "split norms and residuals by token over the TP ranks; no effect with TP 1",
        used_if="tensor_model_parallel_size>1",
    )
    micro_batch_size: int = free(
        1, "samples per forward on one rank", ge=1, used_if="!max_tokens_per_micro_batch"
    )
    max_tokens_per_micro_batch: int | None = free(
        None,
        "tokens per forward on the ranks of a context-parallel group, not micro_batch_size; with "
        "neither of the two, packed rows, and losses that are no means of micro-batches, 8192, or "
        "seq_length if that is more",
        ge=1,
        only_if="packed_sequences",
    )
    bf16: bool = key(False, "weights and activations in bfloat16")
    packed_sequences: bool = free(True, "no padding in forward and backward")
    share_prompts: bool = free(
        True,
        "responses to one prompt compute it once",
        used_if="packed_sequences; backend=megatron",
    )
    offload: OffloadConfig = free(
        OffloadConfig(), "memory that leaves the device outside of the role's phases"
    )

    @property
    def has_fp32_logits(self) -> bool:
        """Whether a bf16 model's logits are fp32; a score head's outputs always are."""
        return False

    @property
    def model_chunks(self) -> int:
        """Layer chunks per pipeline rank; more than 1 = virtual pipeline."""
        per_chunk = self.num_layers_per_virtual_pipeline_stage
        if per_chunk is None:
            return 1
        return self.architecture.num_layers // (self.pipeline_model_parallel_size * per_chunk)

    @property
    def layers_per_chunk(self) -> int:
        """Layers per pipeline stage, or per chunk if stages have several; rounded down."""
        stages = self.pipeline_model_parallel_size * self.model_chunks
        return self.architecture.num_layers // stages

    @property
    def micro_batch_multiple(self) -> int:
        """Divisor for the number of micro-batches: the stages of a virtual pipeline, else 1."""
        return self.pipeline_model_parallel_size if self.model_chunks > 1 else 1

    @property
    def adapters(self) -> LoraConfig:
        """The role's low-rank adapters; of rank 0 in a frozen role."""
        return LoraConfig()

    @property
    def freezes_attention(self) -> bool:
        """Whether the attention layers of a role that is trained are not."""
        return False

    def _broken_rules(self) -> Iterator[Problem]:
        if self.architecture is None:  # a reward computed by a rule has no model
            return
        if self.offload.optimizer and not isinstance(self, LearningConfig):
            yield Problem("offload.optimizer", "needs a role that is trained", True, "remove it")
        if self.backend == "fsdp":
            yield from self._check_sharded()
        yield from self._check_pipeline()
        yield from self._check_context()
        tp = self.tensor_model_parallel_size
        yield from find_uneven("tensor_model_parallel_size", tp, self.architecture, self.model)

    def _check_sharded(self) -> Iterator[Problem]:
        """Yield problems with keys that backend fsdp does not have."""
        fsdp = f"{ref('backend')}=fsdp"
        for name in (TP, PIPELINE, "expert_model_parallel_size"):
            size = getattr(self, name)
            if size > 1:
                remedy = f"use 1, all ranks share the weights, or {ref('backend')}=megatron"
                yield Problem(name, f"must be 1 with {fsdp}", size, remedy)
        a = self.architecture
        if a.balances_experts:
            rule = f"is not computed with {fsdp}"
            coefficient = f"{a.moe_aux_loss_coeff:g}"
            yield Problem("architecture.moe_aux_loss_coeff", rule, coefficient, "use 0")

    def _check_context(self) -> Iterator[Problem]:
        """Yield problems with dividing the tokens, and the heads inside attention."""
        cp = self.context_parallel_size
        tp = self.tensor_model_parallel_size
        a = self.architecture
        if cp == 1:
            return
        if self.backend == "megatron" and not self.packed_sequences:
            rule = f"needs {ref('packed_sequences')}=true with {ref('backend')}=megatron"
            yield Problem(CP, rule, cp, "use that, or 1")
        heads = f"{a.num_attention_heads} heads and {a.kv_heads} key-value heads"
        legal_sizes = []
        for size in divisors(a.num_attention_heads):
            if a.num_attention_heads % (size * tp) == 0 and whole_groups(a, size * tp):
                legal_sizes.append(size)
        if legal_sizes and cp not in legal_sizes:  # without any, the tensor-parallel size is wrong
            times = f"times {ref(TP)}={tp} " if tp > 1 else ""
            rule = f"{times}must divide the {heads} of {self.model}, or the latter it"
            yield Problem(CP, rule, cp, use(neighbours(cp, legal_sizes)))

    def _check_pipeline(self) -> Iterator[Problem]:
        layers = self.architecture.num_layers
        pp = self.pipeline_model_parallel_size
        per_chunk = self.num_layers_per_virtual_pipeline_stage
        if layers % pp:
            yield from divides(PIPELINE, pp, f"the {layers} layers of {self.model}", layers)
        elif per_chunk is not None and pp > 1:
            total = f"the {layers // pp} layers of a pipeline stage of {self.model}"
            yield from divides(CHUNK, per_chunk, total, layers // pp)


class LearningConfig(RoleConfig, OptimizerConfig):
    """Keys for trained roles."""

    save: FilePath | None = free(
        None, "folder of the trained weights; null = final/ in the run directory"
    )
    shuffle_minibatch: bool = key(False, "shuffle samples before they are split into mini-batches")
    balance_by_length: bool = free(
        True, "give replicas samples of equal cost; fill micro-batches by tokens"
    )
    lora: LoraConfig = key(LoraConfig(), "low-rank adapters, trained in place of the weights")
    recompute: Annotated[Recompute, Word] = free(
        Recompute.NONE,
        "compute activations again in backward: of norms and gated activations (elementwise), of "
        "MLPs (selective), or of whole layers",
    )
    recompute_method: Literal["uniform", "block"] = free(
        "uniform",
        "uniform = all layers, block = the first ones of a stage",
        used_if="recompute=full; backend=megatron",
    )
    recompute_num_layers: int = free(
        1,
        "layers of a group (uniform), or of a stage (block)",
        ge=1,
        used_if="recompute=full; backend=megatron",
    )

    @property
    def adapters(self) -> LoraConfig:
        """The key `lora`."""
        return self.lora

    @property
    def optimizer(self) -> OptimizerConfig:
        """The role's optimizer keys, which are part of its section."""
        return self

    def _broken_rules(self) -> Iterator[Problem]:
        yield from RoleConfig._broken_rules(self)
        yield from OptimizerConfig._broken_rules(self)
        a = self.architecture
        tp = self.tensor_model_parallel_size
        if a.num_experts is not None and tp > 1 and not self.sequence_parallel:
            yield Problem(
                "sequence_parallel", f"must be true with {ref(TP)}={tp}", False, "use true"
            )
        yield from self._check_lora()
        # The last stage alone knows a micro-batch's weight.
        if a.balances_experts and self.pipeline_model_parallel_size > 1:
            rule = f"needs {ref(PIPELINE)}=1"
            coefficient = f"{a.moe_aux_loss_coeff:g}"
            yield Problem("architecture.moe_aux_loss_coeff", rule, coefficient, "use 0")
        if self.backend == "fsdp":
            if self.recompute in (Recompute.ELEMENTWISE, Recompute.SELECTIVE):
                rule = f"must be none or full with {ref('backend')}=fsdp"
                yield Problem("recompute", rule, self.recompute.value, "use full")
            return
        # With wrong recompute_num_layers Megatron fails at the first step or recomputes fewer.
        if self.recompute is Recompute.FULL and not any(self._check_pipeline()):
            size = self.recompute_num_layers
            layers = self.layers_per_chunk
            check = divides if self.recompute_method == "uniform" else at_most
            total = f"the {layers} layers of a stage or chunk of {self.model}"
            yield from check("recompute_num_layers", size, total, layers)

    def _check_lora(self) -> Iterator[Problem]:
        a = self.architecture
        tp = self.tensor_model_parallel_size
        lora = self.lora
        if lora.rank == 0 or self.backend != "megatron":  # whose engine knows the modules
            return
        modules = [*linear_modules(a)]
        if not any(map(lora.selects, modules)):
            yield lora.selects_nothing(modules, self.model)
        if tp > a.kv_heads:
            rule = f"must be at most num_query_groups={a.kv_heads} with {ref('lora.rank')}"
            yield Problem(TP, rule, tp, f"use {a.kv_heads} or less")


class PolicyConfig(RoleConfig):
    """Keys of the roles with logits."""

    fp32_head: bool = key(
        False,
        "logits of a bf16 model in fp32: log-probs of rollout and training are closer",
        used_if="bf16",
    )

    @property
    def has_fp32_logits(self) -> bool:
        """Whether a bf16 model's logits are fp32."""
        return self.bf16 and self.fp32_head


class ActorConfig(LearningConfig, PolicyConfig):
    """The policy: generation and training."""

    do_sample: bool = key(
        False, "sample; false = greedy; true by default in ray_grpo and ray_online_dpo"
    )
    temperature: float = key(
        1.0, "divides the logits; used only when sampling", gt=0, used_if="do_sample"
    )
    top_k: int = key(
        0, "sample among this many; 0 = all", ge=0, used_if="do_sample; !fixed_responses"
    )
    top_p: float = key(
        1.0,
        "sample among the likeliest tokens whose probabilities add up to this",
        gt=0,
        le=1,
        used_if="do_sample; !fixed_responses",
    )
    min_new_tokens: int = key(0, "smallest length of a response, tokens", ge=0, used_if="generates")
    max_prompt_length: int = key(512, "longest prompt, tokens", ge=1)
    max_new_tokens: int = key(
        ..., "longest response, tokens; absent = seq_length - max_prompt_length", ge=1
    )
    num_gpus_for_train: int | None = reshard(
        None,
        "disaggregated pool: its first devices, which only train; null = all train and generate",
        ge=1,
        only_if="num_gpus_for_infer",
    )
    num_gpus_for_infer: int | None = reshard(
        None,
        "disaggregated pool: its other devices, which only generate; null = all train and generate",
        ge=1,
        only_if="num_gpus_for_train; runtime.kind=ray",
    )
    stop_token_ids: Integers = key((), "token ids that end a response besides EOS")
    stop_strings: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Word] = key(
        (), "strings that end a response and stay in it"
    )
    num_samples_per_step: int | None = free(
        None,
        "rows generated at once on a rank; null = what the cache holds",
        ge=1,
        used_if="generates",
    )
    fixed_responses: FilePath | None = key(
        None, "jsonl file of responses that are used instead of generated ones"
    )
    n_samples_per_prompt: int = key(
        1, "responses per prompt; absent = 1, or 2 in ray_online_dpo", ge=1, only_if="do_sample"
    )
    ppo_mini_batch_size: int = key(1, "samples per optimizer step over all DP ranks", ge=1)
    ppo_epochs: int = key(1, "passes over the samples of an iteration", ge=1)
    policy_loss: Choice = key(
        "ppo",
        "ratio of each token (ppo) or of each response (gspo, geo_mean), its clipped weight "
        "(cispo), none (gpg), tokens outside the clip range left out (dis), the covariant tokens "
        "left out (clip_cov) or held by a KL term (kl_cov), or a plugin's loss",
        only_if=NOT_DPO,
    )
    covariance_fraction: float = key(
        2e-4,
        "fraction of the tokens of a micro-batch that count as covariant",
        gt=0,
        le=1,
        used_if="looks_for_covariance",
    )
    covariance_kl_coef: float = key(
        0.1, "weight of the KL term of covariant tokens", ge=0, used_if="policy_loss=kl_cov"
    )
    clip_ratio: float = key(
        0.2, "clip the probability ratio to 1 +- this", ge=0, only_if=f"{NOT_DPO}; reads_clip_ratio"
    )
    clip_ratio_low: float | None = key(
        None, "clip below 1; null = clip_ratio, or 0.0003 for gspo", ge=0, only_if=NOT_DPO
    )
    clip_ratio_high: float | None = key(
        None, "clip above 1; null = clip_ratio, or 0.0004 for gspo", ge=0, only_if=NOT_DPO
    )
    clip_ratio_c: float | None = key(
        None, "dual clip of negative advantages; null = off", gt=1, only_if=NOT_DPO
    )
    entropy_coeff: float = key(0.0, "weight of the entropy bonus", ge=0, only_if=NOT_DPO)
    dpo_beta: float = key(
        0.1, "stage ray_online_dpo: beta, the factor of the log-ratio", gt=0, only_if=DPO
    )
    dpo_loss_type: Literal["sigmoid", "hinge", "ipo"] = key(
        "sigmoid", "stage ray_online_dpo: loss of a pair", only_if=DPO
    )

    @property
    def logit_temperature(self) -> float:
        """Divisor for the logits in generation and training; 1 for greedy decoding."""
        return self.temperature if self.do_sample else 1.0

    @property
    def looks_for_covariance(self) -> bool:
        """Whether the loss reads `covariance_fraction`."""
        return self.policy_loss in ("clip_cov", "kl_cov")

    @property
    def reads_clip_ratio(self) -> bool:
        """Whether `clip_ratio_low` and `clip_ratio_high` do not both replace `clip_ratio`."""
        return None in (self.clip_ratio_low, self.clip_ratio_high)

    def _broken_rules(self) -> Iterator[Problem]:
        yield from super()._broken_rules()
        limit = f"{ref('max_new_tokens')}={self.max_new_tokens}"
        yield from at_most("min_new_tokens", self.min_new_tokens, limit, self.max_new_tokens)
        vocab_size = self.architecture.vocab_size
        outside = [token for token in self.stop_token_ids if not 0 <= token < vocab_size]
        if outside:
            yield Problem("stop_token_ids", f"must be below {vocab_size}", outside, "remove them")


class RefConfig(PolicyConfig):
    """The frozen policy behind the KL penalty."""

    load: FilePath | None = key(None, "folder of the frozen weights, Hugging Face's or Megatron's")


class CriticConfig(LearningConfig):
    """The value model."""

    critic_mini_batch_size: int = key(1, "samples per optimizer step over all DP ranks", ge=1)
    critic_update_epochs: int = key(1, "passes over the samples of an iteration", ge=1)
    warmup_iters: int = key(0, "number of first iterations that train the critic alone", ge=0)
    freeze: Literal["none", "attention"] = key(
        "none", "layers that are not trained: none, or attention (SAO); their norms are trained"
    )
    freeze_after: int | None = key(
        None, "number of iterations after which the critic is trained no more; null = all", ge=1
    )
    cliprange_value: float | None = key(3.0, "value clip; null = none", gt=0)
    vf_coef: float = key(1.0, "weight of the value loss", ge=0)

    @property
    def freezes_attention(self) -> bool:
        """The key `freeze`."""
        return self.freeze == "attention"

    def _broken_rules(self) -> Iterator[Problem]:
        yield from super()._broken_rules()
        if self.freezes_attention and self.backend != "megatron":
            yield Problem("freeze", "needs backend=megatron", self.freeze, "use none")
        if self.freezes_attention and self.lora.rank:
            rule = f"must be none with {ref('lora.rank')}, which freezes all layers"
            yield Problem("freeze", rule, self.freeze, "remove one of them")
        if self.freeze_after is not None and self.freeze_after < self.warmup_iters:
            rule = f"must be at least {ref('warmup_iters')}={self.warmup_iters}"
            yield Problem("freeze_after", rule, self.freeze_after, f"use {self.warmup_iters}")
