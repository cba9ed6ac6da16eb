"""Compute a role's device memory on one pipeline stage: what lasts, and what phases add.

`docs/models_and_weights.md` explains the main formulas. Bytes are per rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

from mindspeed_rlxf import device
from mindspeed_rlxf.config.architecture import groups_per_rank, qkv_rows
from mindspeed_rlxf.config.enums import DeviceKind, KlPenalty, Recompute, Role
from mindspeed_rlxf.config.schema import (
    ArchitectureConfig,
    LearningConfig,
    RoleConfig,
    RunConfig,
)
from mindspeed_rlxf.models.heads import CHUNK_TOKENS
from mindspeed_rlxf.models.parameter_counts import HEADS, adapter_sizes, split_sizes
from mindspeed_rlxf.models.parameters import Head, padded_vocab_size

FP32 = 4
POOL_GROUP = 1  # a disaggregated pool has one more communicator, for weights


class State(NamedTuple):
    """Bytes for weights, gradients and optimizer."""

    weights: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Phase:
    """What a phase adds to its role's lasting memory, in bytes.

    Attributes:
        learns: Whether the phase also uses gradients and optimizer.
        beside: Another role whose weights must be on the device too.
    """

    name: str
    activations: int = 0
    kv_cache: int = 0
    other: int = 0
    learns: bool = False
    beside: Role | None = None

    @property
    def total(self) -> int:
        """Sum what the phase adds."""
        return self.activations + self.kv_cache + self.other


@dataclass(frozen=True)
class LayerBytes:
    """One layer's activations for a micro-batch; a layer has two norms.

    Attributes:
        sent: Hidden-state copies on the way to experts and back, 0 if dense.
        entry: Hidden states entering the layer, or a norm.
        exchange: Beside `attention` while context-parallel ranks exchange tokens for heads.
        widened: Of `mlp`, what remains without gated activations.
    """

    norm: int
    attention: int
    mlp: int
    sent: int
    entry: int
    exchange: int = 0
    widened: int = 0

    @property
    def kept(self) -> int:
        """Sum what is kept for backward."""
        return 2 * self.norm + self.attention + self.mlp

    @property
    def forward(self) -> int:
        """Return the peak without gradients: attention is freed before the MLP begins."""
        return self.entry + self.norm + max(self.attention + self.exchange, self.mlp)


def layer_bytes(
    a: ArchitectureConfig,
    tokens: int,
    tp: int,
    sequence_parallel: bool,
    itemsize: int,
    frozen_norms: bool = False,
    cp: int = 1,
) -> LayerBytes:
    """Compute a layer's activations on one rank, which has `tokens` outside attention."""
    rank_tokens = tokens // tp if sequence_parallel else tokens  # outside tensor parallelism
    # A norm keeps its input in fp32, the normed value for the gradient of its weight, the output,
    # and a root per token.
    norm = rank_tokens * ((FP32 + (1 if frozen_norms else 2) * itemsize) * a.hidden_size + FP32)
    # Projections, rotated queries and keys, cosines and sines, the output twice, the log of the
    # softmax's divisor. Ranks that share a key-value group gather the projections of all ranks.
    queries = a.num_attention_heads * a.head_dim // tp
    keys = groups_per_rank(a.kv_heads, tp) * a.head_dim
    projected = qkv_rows(a) if tp > a.kv_heads else queries + 2 * keys
    attention = projected + 3 * queries + keys
    exchange = 0
    if cp > 1:
        # What is exchanged takes the place of projections and rotated queries and keys. They are
        # all there while values are exchanged, which takes a copy to send or to join, and while the
        # output is. Ranks that share a key-value group have a copy of its keys and values each.
        own_keys = groups_per_rank(a.kv_heads, tp * cp) * cp * a.head_dim
        copies = 2 * own_keys if own_keys > keys else 0
        largest = max(queries + 3 * own_keys + copies + own_keys, 3 * queries)
        before = projected + queries + keys
        attention = 3 * queries + 2 * own_keys
        exchange = tokens * itemsize * (before + largest - attention)
    attention = itemsize * (attention + 4 * a.head_dim) + FP32 * a.num_attention_heads // tp
    if a.qk_layernorm:
        attention += (FP32 + itemsize) * (queries + keys)
    # Both halves of the first matrix's output, the activated gate, the other half, their product.
    mlp = tokens * 5 * itemsize * a.mlp_hidden_size // tp
    widened = tokens * 2 * itemsize * a.mlp_hidden_size // tp
    sent = 0
    if a.num_experts:
        # With balanced routing, and every rank of a TP group sends all tokens without sequence
        # parallel. Also the hidden state, the product times the router's weight, and the routing.
        pairs = tokens * a.moe_router_topk * (1 if sequence_parallel else tp)
        routing = tokens * (5 * a.num_experts + 12 * a.moe_router_topk)
        mlp = pairs * itemsize * (a.hidden_size + 6 * a.mlp_hidden_size // tp) + routing
        widened = pairs * itemsize * (a.hidden_size + 2 * a.mlp_hidden_size // tp) + routing
        sent = 3 * pairs * a.hidden_size * itemsize
    entry = rank_tokens * a.hidden_size * itemsize
    return LayerBytes(norm, tokens * attention, mlp, sent, entry, exchange, widened)


def logit_bytes(config: RunConfig, role: Role, itemsize: int, learns: bool) -> int:
    """Return the peak bytes per logit of a chunk from which log-probs come.

    The fp32 logits become exponentials in place; a bf16 model has its own logits beside them. An
    update also has products for the entropy, or the logits' gradient (`learns`), with
    `entropy_coeff` two more for the entropy's. KL over the vocabulary compares two distributions.
    """
    narrow = itemsize if itemsize < FP32 else 0
    if learns:
        num_arrays = 4 if config.actor_rollout.entropy_coeff else 2
    else:
        is_full = config.algorithm.kl_penalty is KlPenalty.FULL and role is Role.REF
        num_arrays = 4 if is_full else 1
    return num_arrays * FP32 + narrow


def head_bytes(
    a: ArchitectureConfig,
    head: Head,
    tokens: int,
    read: int,
    itemsize: int,
    vocab: int,
    per_logit: int,
) -> int:
    """Compute the last hidden states of `tokens`, and the head for those of them that it reads.

    These are the final norm's input in fp32, its normed value and output, and a copy for the
    tokens read. A score head copies those in fp32; log-probs need `logit_bytes` per logit, for one
    chunk at a time, with `vocab` rows on this rank.
    """
    hidden_bytes = a.hidden_size * (tokens * (FP32 + 2 * itemsize) + read * itemsize)
    if head is Head.SCORE:
        return hidden_bytes + FP32 * read * a.hidden_size
    return hidden_bytes + per_logit * min(read, CHUNK_TOKENS) * vocab


def fp32_weight_bytes(config: RunConfig, role: RoleConfig, vocab: int) -> int:
    """Return the fp32 copy of `vocab` output weights from which a bf16 model's logits come.

    CUDA adds up products of bf16 into fp32 without one (`heads.fp32_linear`).
    """
    if not role.has_fp32_logits or device.resolve_kind(config.device.kind) is DeviceKind.CUDA:
        return 0
    return FP32 * vocab * role.architecture.hidden_size


def recompute_bytes(role: LearningConfig, layer: LayerBytes) -> tuple[int, int]:
    """Return (bytes kept per micro-batch in flight, bytes recomputed at one time) for a chunk.

    - none: all layers; 0
    - elementwise: the layers without what norms and gated activations keep; that of one MLP
    - selective: the layers without their MLPs; one MLP
    - uniform: one entry per group with `recompute_num_layers` layers; one group's layers
    - block: entries for the first `recompute_num_layers` layers, and the other layers; one layer if
      there are no others, else 0
    """
    layers = role.layers_per_chunk
    size = role.recompute_num_layers
    if role.recompute is Recompute.NONE:
        return layers * layer.kept, 0
    if role.recompute is Recompute.ELEMENTWISE:
        activation = layer.mlp - layer.widened
        norms = 2 * (layer.norm - layer.entry)
        return layers * (layer.kept - norms - activation), norms // 2 + activation
    if role.recompute is Recompute.SELECTIVE:
        return layers * (layer.kept - layer.mlp), layer.mlp
    if role.recompute_method == "uniform":
        return layers // size * layer.entry, size * layer.kept
    # Activations that are kept are of later layers, so they are freed before one is recomputed.
    activations = size * layer.entry + (layers - size) * layer.kept
    recomputed = layer.kept if size == layers else 0
    return activations, recomputed


def itemsize(role: RoleConfig) -> int:
    """Return the bytes per weight or activation: 2 with bf16, else 4."""
    return 2 if role.bf16 else FP32


def optimizer_itemsize(role: RoleConfig) -> int:
    """Return Adam's bytes per parameter: two fp32 moments, and for bf16 weights an fp32 copy."""
    return 3 * FP32 if role.bf16 else 2 * FP32


def micro_batch_tokens(role: RoleConfig, samples: int, length: int) -> int:
    """Return a rank's largest micro-batch of `samples` with `length` tokens or less, in tokens."""
    limit = role.max_tokens_per_micro_batch
    if limit is None:
        return min(role.micro_batch_size, samples) * length
    return min(limit, samples * length)


def micro_batches(role: RoleConfig, samples: int, length: int) -> int:
    """Return the number of micro-batches for `samples` on a rank, rounded up."""
    limit = role.max_tokens_per_micro_batch
    size = role.micro_batch_size if limit is None else max(limit // length, 1)
    return _round_up(-(-samples // size), role.micro_batch_multiple)


def buffer_numbers(sizes: Sequence[int], dp: int, distributed: bool) -> int:
    """Return the elements in Megatron's gradient buffer for these parameter sizes.

    The distributed optimizer pads each parameter to a multiple of 64, and the buffer to a multiple
    of 128 and `dp`; the weights are in a buffer with this length too.
    """
    if not distributed:
        return sum(sizes)
    return _round_up(sum(_round_up(size, 64) for size in sizes), lcm(dp, 128))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def in_flight(pp_rank: int, pp: int, micro_batches: int, chunks: int = 1) -> int:
    """Return the forward passes that a stage holds before its first backward pass.

    The schedule is 1F1B, interleaved for several chunks.
    """
    if chunks == 1:
        return min(pp - pp_rank, micro_batches)
    return min(2 * (pp - pp_rank - 1) + (chunks - 1) * pp + 1, micro_batches * chunks)


def is_split(config: RunConfig, pool: str) -> bool:
    """Return whether some pool ranks train the actor and the others only generate."""
    return config.train_rollout_split is not None and pool == config.placement[Role.ACTOR_ROLLOUT]


def role_beside(config: RunConfig, role: Role) -> Role | None:
    """Return the role whose weights must be on the device too while this one works.

    A reference that computes the full KL, or is the actor without its adapters, needs the actor's.
    """
    compares = config.algorithm.kl_penalty is KlPenalty.FULL or config.shares_reference
    return Role.ACTOR_ROLLOUT if role is Role.REF and compares else None


def mini_batch_size(config: RunConfig, role: Role) -> int:
    """Return the samples of a step of a trained role."""
    if role is Role.CRITIC:
        return config.value_model.critic_mini_batch_size
    return config.actor_rollout.ppo_mini_batch_size


class PipelineStage:
    """One role on one pipeline stage, with the sizes behind its memory."""

    def __init__(self, config: RunConfig, role: Role, pp_rank: int) -> None:
        self.config = config
        self.role = role
        self.pp_rank = pp_rank
        self.section = config.role(role)
        self.head = HEADS[role]
        self.layout = config.layout(role)
        self.itemsize = itemsize(self.section)
        self.architecture = self.section.architecture
        # A shared reference is the actor's model, whose row has all that lasts.
        self.is_shared = role is Role.REF and config.shares_reference
        self.optimizer = None
        self.lora = self.section.adapters
        if isinstance(self.section, LearningConfig) and not self.is_shared:
            self.optimizer = self.section.optimizer
        self.sequence_parallel = self.section.sequence_parallel and self.layout.tp > 1
        self.ep = self.section.expert_model_parallel_size
        dp = self.layout.dp
        copies = dp * self.layout.cp  # of the weights, which sum their gradients
        stage = (pp_rank, self.layout.pp, self.section.model_chunks)
        self.shard = (self.architecture, self.head, self.layout.tp, *stage, self.ep)
        self.shared, self.experts = split_sizes(*self.shard)
        self.numbers = sum(self.shared) + sum(self.experts)
        # Elements of one of Megatron's buffers, and the replicas that sum its gradients.
        trained, experts = split_sizes(
            *self.shard, with_attention=not self.section.freezes_attention
        )
        separate = [(trained, copies), (experts, copies // self.ep)]
        self.buffers = separate if self.ep > 1 else [(trained + experts, copies)]
        self.is_last = pp_rank == self.layout.pp - 1
        self.frozen = self.numbers - sum(trained) - sum(experts)  # elements without gradients
        self.adapters: tuple[int, ...] = ()
        if self.lora.rank:
            self.adapters = adapter_sizes(
                self.architecture, self.head, self.lora, self.layout.tp, *stage
            )
            has_score_head = self.is_last and self.head is Head.SCORE
            heads = (self.architecture.hidden_size,) if has_score_head else ()
            self.buffers = [(self.adapters + heads, copies)]
            self.frozen = self.numbers - sum(heads)
        actor = config.actor_rollout
        self.response = actor.max_new_tokens
        self.length = actor.max_prompt_length + self.response
        self.samples = config.samples_per_iteration // dp  # on this rank
        self.vocab = padded_vocab_size(self.architecture, self.layout.tp) // self.layout.tp

    def state(self) -> State:
        """Return the bytes for weights, gradients and optimizer."""
        if self.is_shared:
            return State(0, 0, 0)
        if self.optimizer is None:
            return State(self.numbers * self.itemsize, 0, 0)
        trained = 0  # elements in buffers, padding included
        optimizer_bytes = 0
        distributed = self.optimizer.use_distributed_optimizer
        for sizes, replicas in self.buffers:
            numbers = buffer_numbers(sizes, replicas, distributed)
            num_shards = replicas if distributed else 1
            optimizer_bytes += numbers // num_shards * optimizer_itemsize(self.section)
            trained += numbers
        weight_bytes = (self.frozen + trained) * self.itemsize
        return State(weight_bytes, trained * FP32, optimizer_bytes)

    def communication_bytes(self) -> int:
        """Return the buffers for all process groups and sequence parallelism, in bytes."""
        if self.is_shared:
            return 0
        config = self.config
        tp = self.layout.tp
        pp = self.layout.pp
        cp = self.layout.cp
        ep = self.ep
        copies = self.layout.dp * cp
        trains = self.optimizer is not None
        generates = self.role is Role.ACTOR_ROLLOUT and not config.train_rollout_split
        norms = trains and tp * pp > 1  # sums the gradient norm
        groups = [tp > 1, pp > 1, cp > 1, copies > 1, norms, generates and tp > 1]
        if self.architecture.num_experts is not None:
            sums = trains and ep > 1  # of gradients, and among ranks with the same experts
            groups += [tp > 1, ep > 1, tp * ep > 1, sums, sums and copies > ep]
            groups += [generates and tp > 1, generates and ep > 1]
        count = sum(groups) + POOL_GROUP * is_split(config, config.placement[self.role])
        total = count * device.communicator_bytes(config.device.kind)
        if self.sequence_parallel:  # Megatron's permanent buffer for gathers
            shared = all(self._sharing(updates=False)) and all(self._sharing(updates=trains))
            tokens = self._own_tokens(self.samples, shared)
            total += tokens * self.architecture.hidden_size * self.itemsize
        return total

    def phases(self) -> Iterator[Phase]:
        """Yield forward and, for a trained role, update and optimizer step."""
        beside = role_beside(self.config, self.role)
        forwards = [self._forward(shared, beside) for shared in self._sharing(updates=False)]
        yield max(forwards, key=lambda phase: phase.total)
        if self.optimizer is None:
            return
        samples = mini_batch_size(self.config, self.role) // self.layout.dp
        updates = [self._update(samples, shared) for shared in self._sharing(updates=True)]
        yield max(updates, key=lambda phase: phase.total)
        # torch's Adam takes the roots of all second moments at once.
        max_elements = 0
        for sizes, replicas in self.buffers:
            num_shards = replicas if self.optimizer.use_distributed_optimizer else 1
            max_elements = max(max_elements, sum(sizes) // num_shards)
        yield Phase("optimizer step", other=max_elements * FP32, learns=True)

    def _sharing(self, updates: bool) -> list[bool]:
        """Return whether prompts are shared: one value if it is certain, else both."""
        config = self.config
        on_npu = device.resolve_kind(config.device.kind) is DeviceKind.NPU
        if config.shared_samples(self.role, 0) == 1 or (on_npu and config.training.deterministic):
            return [False]
        # A reward model also scores samples whose prompts differ, of validation.
        certain = self.role is not Role.REWARD
        certain &= not updates or config.shares_in_updates(self.role)
        return [True] if certain else [False, True]

    def _forward(self, shared: bool, beside: Role | None) -> Phase:
        layer = self._layer(self.samples, shared)
        # Of the widest linear the output, what adapters add, and parts of that.
        forward = layer.forward + self._adapted_bytes(self.samples, shared)
        activations = max(forward, self._head_bytes(self.samples, shared))
        return Phase("forward", activations, other=layer.sent, beside=beside)

    def _update(self, samples: int, shared: bool) -> Phase:
        """Compute forward and backward passes with `samples` per step on this rank."""
        assert isinstance(self.section, LearningConfig), "frozen roles have no update"
        pp = self.layout.pp
        layer = self._layer(samples, shared)
        kept, recomputed = recompute_bytes(self.section, layer)
        if pp > 1:  # received and sent hidden states
            kept += 2 * layer.entry
        count = micro_batches(self.section, samples, self.length)
        num_in_flight = in_flight(self.pp_rank, pp, count, self.section.model_chunks)
        # The gradient of one parameter before it is added to the buffer; a grouped GEMM has
        # those of all experts of a layer at once.
        grouped = device.resolve_kind(self.config.device.kind) is not DeviceKind.NPU
        num_experts = (self.architecture.num_experts or 0) // self.ep if grouped else 1
        if self.lora.rank:
            widest = max(self.buffers[0][0], default=0)
        else:
            widest_expert = num_experts * max(self.experts, default=0)
            widest = max(max(self.shared, default=0), widest_expert)
        gradient_bytes = widest * self.itemsize
        assert self.optimizer is not None, "it is trained"
        is_chunked = self.is_last and self._head_tokens(samples) > CHUNK_TOKENS
        sums_chunks = is_chunked and self.head is Head.LANGUAGE_MODEL and self.section.bf16
        if sums_chunks and not self.lora.rank and self.optimizer.overlap_grad_reduce:
            # A gradient that is reduced early needs the sum of the chunks beside it.
            gradient_bytes += FP32 * self.vocab * self.architecture.hidden_size
        # The linear's gradient of its input is joined by the adapter's, and by their sum.
        recomputed += 2 * self._adapted_bytes(samples, shared)
        # The head's activations are freed before the backward pass reaches a layer.
        activations = num_in_flight * kept
        activations += max(self._head_bytes(samples, shared, learns=True), recomputed)
        return Phase("update", activations, other=gradient_bytes + layer.sent, learns=True)

    def _tokens(self, samples: int, shared: bool) -> tuple[int, int]:
        """Return the largest micro-batch's computed tokens, and its rows that share prompts.

        samples: In an epoch or mini-batch on this rank.
        """
        tokens = micro_batch_tokens(self.section, samples, self.length)
        together = self.config.shared_samples(self.role, samples)
        if not shared or together == 1:
            return tokens, 0
        prompt = self.length - self.response
        limit = self.section.max_tokens_per_micro_batch
        if limit is not None:  # which counts computed tokens
            rows = together * (limit // (prompt + together * self.response))
            return tokens, min(samples, max(rows, limit // self.length))
        rows = min(self.section.micro_batch_size, samples)
        return tokens - (rows - rows // together) * prompt, rows

    def _own_tokens(self, samples: int, shared: bool) -> int:
        """Return this context-parallel rank's tokens of the largest micro-batch."""
        return -(-self._tokens(samples, shared)[0] // self.layout.cp)

    def _adapted_bytes(self, samples: int, shared: bool) -> int:
        """Return the bytes of the widest input or output of an adapter; 0 without adapters."""
        if not self.lora.rank:
            return 0
        width = max(self.adapters, default=0) // self.lora.rank
        return self._own_tokens(samples, shared) * width * self.itemsize

    def _layer(self, samples: int, shared: bool) -> LayerBytes:
        _, rows = self._tokens(samples, shared)
        tokens = self._own_tokens(samples, shared)
        a = self.architecture
        tp = self.layout.tp
        cp = self.layout.cp
        adapted = self.lora.rank > 0
        layer = layer_bytes(a, tokens, tp, self.sequence_parallel, self.itemsize, adapted, cp)
        # Products with A of each adapter.
        pairs = len(self.adapters) // (
            2 * self.section.model_chunks * self.section.layers_per_chunk
        )
        inner = tokens * pairs * self.lora.rank * self.itemsize
        # Of rows that share a prompt: keys and values with the prompt of each, queries and results.
        keys = rows * self.length * groups_per_rank(a.kv_heads, tp * cp)
        queries = rows * self.response * a.num_attention_heads // (tp * cp)
        copies = 2 * (keys + queries) * a.head_dim * self.itemsize
        # Experts that no grouped GEMM computes keep their gated activations.
        experts = (a.num_experts or 0) // self.ep
        on_npu = device.resolve_kind(self.config.device.kind) is DeviceKind.NPU
        keeps_activations = a.num_experts is not None and (on_npu or experts == 1)
        return replace(
            layer,
            attention=layer.attention + copies,
            mlp=layer.mlp + inner,
            widened=(layer.mlp if keeps_activations else layer.widened) + inner,
        )

    def _head_bytes(self, samples: int, shared: bool, learns: bool = False) -> int:
        """Return a micro-batch's last hidden states and head; 0 before the last stage."""
        if not self.is_last:
            return 0
        tokens = self._own_tokens(samples, shared)
        read = self._head_tokens(samples)
        per_logit = logit_bytes(self.config, self.role, self.itemsize, learns)
        sizes = tokens, read, self.itemsize, self.vocab, per_logit
        head = head_bytes(self.architecture, self.head, *sizes)
        if self.head is Head.LANGUAGE_MODEL:
            head += fp32_weight_bytes(self.config, self.section, self.vocab)
        return head

    def _head_tokens(self, samples: int) -> int:
        # The responses are at the end of their rows, so one rank may have most of a row's.
        slots = self.response if self.head is Head.LANGUAGE_MODEL else self.response + 1
        read = micro_batch_tokens(self.section, samples, slots)
        return min(read, self._own_tokens(samples, shared=False))
