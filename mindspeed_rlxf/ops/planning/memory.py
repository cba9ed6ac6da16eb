"""Compute the memory of a pool's devices: lasting memory of each role, and memory of its phases.

Roles of a pool share a process, so their lasting memory adds up. Their phases follow one another,
so only the largest phase counts. An offloaded part counts only in the phases that use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mindspeed_rlxf import device
from mindspeed_rlxf.config import memory
from mindspeed_rlxf.config.enums import DeviceKind, KlPenalty, RewardKind, Role
from mindspeed_rlxf.config.layout import ParallelLayout, count_per_node
from mindspeed_rlxf.config.schema import (
    ArchitectureConfig,
    LearningConfig,
    OffloadConfig,
    OptimizerConfig,
    RunConfig,
)
from mindspeed_rlxf.models.heads import CHUNK_TOKENS
from mindspeed_rlxf.models.parameters import Head, padded_vocab_size
from mindspeed_rlxf.models.sizes import HEADS, received_numbers, shard_sizes, split_sizes
from mindspeed_rlxf.ops.planning.available import rollout_memory
from mindspeed_rlxf.rollout.transfer import BUCKET_BYTES

TRAINS, GENERATES = "ranks that train", "ranks that generate"
POOL_GROUP = 1  # a split pool has one more communicator, for weights


State = tuple[int, int, int]
"""Bytes of weights, gradients and optimizer."""


@dataclass(frozen=True)
class Phase:
    """Bytes that a phase of a role needs beside the role's lasting memory.

    learns: the phase also uses gradients and optimizer
    beside: another role whose weights the phase uses
    """

    name: str
    activations: int = 0
    kv_cache: int = 0
    other: int = 0
    learns: bool = False
    beside: Role | None = None

    @property
    def total(self) -> int:
        return self.activations + self.kv_cache + self.other


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one role on one rank. other: lasting communication buffers"""

    role: Role
    weights: int
    gradients: int
    optimizer: int
    other: int
    phases: tuple[Phase, ...]
    offload: OffloadConfig

    @property
    def state(self) -> State:
        """Weights, gradients, optimizer."""
        return self.weights, self.gradients, self.optimizer

    def held(self, phase: Phase | None = None) -> State:
        """Return what the role has on the device in one of its phases; None = in other roles'."""
        weights = not self.offload.weights or phase is not None
        rest = not self.offload.optimizer or (phase is not None and phase.learns)
        return self.weights * weights, self.gradients * rest, self.optimizer * rest

    @property
    def copies(self) -> int:
        """Return the bytes of the role's copies in host memory; gradients are not copied."""
        offload = self.offload
        return self.weights * offload.weights + self.optimizer * offload.optimizer


@dataclass(frozen=True)
class PoolMemory:
    """Bytes of one rank of a pool. process: bytes of the process without roles"""

    pool: str
    rank: int
    roles: tuple[RoleMemory, ...]
    process: int
    processes: tuple[int, ...]  # of the pool, or of the part of it, on each node
    part: str = ""  # of a pool that is split

    @property
    def peak(self) -> tuple[RoleMemory, Phase] | None:
        """The role and phase with the largest need; None if no role has a model."""
        phases = [(role, phase) for role in self.roles for phase in role.phases]
        return max(phases, key=lambda each: sum(self.held(*each)) + each[1].total, default=None)

    def held(self, busy: RoleMemory, phase: Phase) -> State:
        """Sum up what the roles have on the device while a role is in a phase."""
        idle = Phase(phase.name)
        found = [
            role.held(phase if role is busy else idle if role.role is phase.beside else None)
            for role in self.roles
        ]
        weights, gradients, optimizer = (sum(values) for values in zip(*found, strict=True))
        return weights, gradients, optimizer

    @property
    def total(self) -> int:
        needed = sum(self.held(*self.peak)) + self.peak[1].total if self.peak else 0
        return self.process + sum(role.other for role in self.roles) + needed

    @property
    def copies(self) -> int:
        """Return the bytes of offloaded parts in the host's memory."""
        return sum(role.copies for role in self.roles)


def has_model(config: RunConfig, role: Role) -> bool:
    """Whether a role computes with a model; False for a reward by rule."""
    return role is not Role.REWARD or config.reward.kind is RewardKind.MODEL


def pool_memories(config: RunConfig, pool: str) -> list[PoolMemory]:
    """Return the memory of the rank with the largest need: one item, or one per part of a pool."""
    if not is_split(config, pool):
        return [pool_memory(config, pool)]
    return [replace(pool_memory(config, pool), part=TRAINS), _generating_rank(config, pool)]


def is_split(config: RunConfig, pool: str) -> bool:
    return config.parts is not None and pool == config.pool_of(Role.ACTOR_ROLLOUT)


def _generating_rank(config: RunConfig, pool: str) -> PoolMemory:
    """Return the memory of a rank that only generates: all layers, and the KV cache."""
    assert config.parts is not None, "the pool is split"
    actor, tp, ep = config.actor_rollout, config.rollout_tp, config.rollout_ep
    item = memory.itemsize(actor)
    numbers = sum(shard_sizes(actor.architecture, Head.LANGUAGE_MODEL, tp, 0, 1, 1, ep))
    weights = memory.weight_bytes(numbers, item)
    groups = (2 if actor.architecture.num_experts else 1) * (tp > 1) + (ep > 1) + POOL_GROUP
    rollout = RoleMemory(
        Role.ACTOR_ROLLOUT,
        weights,
        0,
        0,
        groups * device.communicator_bytes(config.device.kind),
        (_buckets("receive weights", weights), generate_phase(config, 0)),
        OffloadConfig(),
    )
    return PoolMemory(
        pool,
        config.parts[0],
        (rollout,),
        device.process_bytes(config.device.kind),
        tuple(count_per_node(config.resource_pool[pool], *config.parts)),
        GENERATES,
    )


def _buckets(name: str, weights: int) -> Phase:
    """Send or receive weights between the parts of a pool."""
    return Phase(name, other=min(BUCKET_BYTES, weights))


def generate_phase(config: RunConfig, received: int) -> Phase:
    """Return the memory of generation on a replica, which has no pipeline.

    received: number of weight elements that are held only during generation
    """
    actor, tp = config.actor_rollout, config.rollout_tp
    rows, held = cache_rows(config), _cache_tokens(config)
    a, item = actor.architecture, memory.itemsize(actor)
    length = actor.max_prompt_length + actor.max_new_tokens
    # With a limited cache, rows that had to wait are prefilled again with their drawn tokens.
    prefill = memory.prefill_tokens(rows, actor.max_prompt_length if held is None else length)
    layer = a, prefill, tp, False, item
    working = memory.layer_activation_bytes(*layer)
    if config.rollout_ep > 1:
        working -= memory.mlp_activation_bytes(*layer)
        working += memory.exchange_bytes(a, prefill, tp, config.rollout_ep, item)
    else:
        working += memory.dispatch_bytes(*layer)
    top_ps = [actor.top_p] if actor.do_sample else []
    if config.has_validation_prompts and config.validation.do_sample:
        top_ps.append(config.validation.top_p)
    sorts = min(top_ps, default=1.0) < 1
    sampling = memory.sampling_bytes(rows, a.vocab_size, bool(top_ps), sorts)
    return Phase(
        "generate",
        max(working, sampling) + memory.row_state_bytes(rows, actor.max_new_tokens),
        memory.kv_cache_bytes(memory.kv_cache_most_tokens(rows, length, held), a, tp, item),
        memory.weight_bytes(received, item),
    )


def pool_memory(config: RunConfig, pool: str) -> PoolMemory:
    """Return the memory of the first rank with the largest need, apart from generating ranks."""
    roles = [role for role in config.roles_of(pool) if has_model(config, role)]
    process = device.process_bytes(config.device.kind)
    ranks: dict[tuple[int, ...], int] = {}
    processes = tuple(config.processes_of(config.roles_of(pool)[0]))
    for rank in range(sum(processes)):
        ranks.setdefault(tuple(config.layout(role).pp_rank(rank) for role in roles), rank)
    needs = [
        PoolMemory(
            pool,
            rank,
            tuple(role_memory(config, r, s) for r, s in zip(roles, stages, strict=True)),
            process,
            processes,
        )
        for stages, rank in ranks.items()
    ]
    return max(needs, key=lambda need: need.total)


def role_memory(config: RunConfig, role: Role, pp_rank: int) -> RoleMemory:
    """Return the memory of a role on the ranks of one pipeline stage."""
    stage = _Stage(config, role, pp_rank)
    optimizer = optimizer_of(config, role)
    numbers, item = sum(stage.sizes), stage.itemsize
    gradients = state = 0
    if optimizer:
        distributed = optimizer.use_distributed_optimizer
        numbers = 0
        for sizes, replicas in stage.buffers:
            held = memory.buffer_numbers(sizes, replicas, distributed)
            state += memory.optimizer_bytes(held, item, replicas if distributed else 1)
            numbers += held
        gradients = memory.gradient_bytes(numbers)
    return RoleMemory(
        role,
        memory.weight_bytes(numbers, item),
        gradients,
        state,
        stage.communication(trains=optimizer is not None),
        tuple(_phases(stage, optimizer)),
        stage.section.offload,
    )


def cache_rows(config: RunConfig) -> int:
    """Count the sequences that a rollout replica generates at once."""
    actor = config.actor_rollout
    waiting = -(-config.samples_per_iteration // config.rollout_layout.dp)
    sizes = actor.max_prompt_length, actor.max_new_tokens
    return memory.kv_cache_rows(actor.num_samples_per_step, waiting, *sizes, _cache_tokens(config))


def _cache_tokens(config: RunConfig) -> int | None:
    """Count the tokens that the cache may hold; None if the number of rows is configured."""
    actor, tp = config.actor_rollout, config.rollout_tp
    token = memory.kv_cache_bytes(1, actor.architecture, tp, memory.itemsize(actor))
    limited = actor.num_samples_per_step is None
    return memory.kv_cache_tokens(token, rollout_memory(config) if limited else None)


def optimizer_of(config: RunConfig, role: Role) -> OptimizerConfig | None:
    """Return the settings of a role's optimizer; None if the role does not learn."""
    section = config.role(role)
    return section.optimizer if isinstance(section, LearningConfig) else None


def _phases(stage: _Stage, optimizer: OptimizerConfig | None) -> Iterator[Phase]:
    """Yield the phases of a stage: forward, update, optimizer step, and sending or generating."""
    config, role = stage.config, stage.role
    yield stage.forward()
    if optimizer:
        mini_batch = config.actor_rollout.ppo_mini_batch_size
        if role is Role.CRITIC:
            mini_batch = config.value_model.critic_mini_batch_size
        yield stage.update(mini_batch // stage.layout.dp)
        distributed = optimizer.use_distributed_optimizer
        roots = [
            memory.optimizer_step_bytes(sum(sizes), replicas if distributed else 1)
            for sizes, replicas in stage.buffers
        ]
        yield Phase("optimizer step", other=max(roots), learns=True)
    if role is Role.ACTOR_ROLLOUT and config.parts:
        yield _buckets("send weights", memory.weight_bytes(sum(stage.sizes), stage.itemsize))
    elif role is Role.ACTOR_ROLLOUT:
        # Weights of other stages, received by a rank that also generates.
        yield generate_phase(config, received_numbers(*stage.shard))


class _Stage:
    """One role on one pipeline stage, with the sizes that its phases depend on."""

    def __init__(self, config: RunConfig, role: Role, pp_rank: int) -> None:
        self.config, self.role, self.pp_rank = config, role, pp_rank
        self.section, self.head = config.role(role), HEADS[role]
        self.layout: ParallelLayout = config.layout(role)
        self.architecture = self.section.architecture
        self.itemsize = memory.itemsize(self.section)
        self.sequence_parallel = self.section.sequence_parallel and self.layout.tp > 1
        self.ep = self.section.expert_model_parallel_size
        place = (pp_rank, self.layout.pp, self.section.model_chunks, self.ep)
        self.shard = (self.architecture, self.head, self.layout.tp, *place)
        self.shared, self.experts = split_sizes(*self.shard)
        self.sizes = self.shared + self.experts
        # Elements of one of Megatron's buffers, and the replicas that sum its gradients.
        self.buffers = [(self.sizes, self.layout.dp)]
        if self.ep > 1:
            expert_replicas = self.layout.dp // self.ep
            self.buffers = [(self.shared, self.layout.dp), (self.experts, expert_replicas)]
        actor = config.actor_rollout
        self.response = actor.max_new_tokens
        self.length = actor.max_prompt_length + self.response
        self.samples = config.samples_per_iteration // self.layout.dp  # on this rank

    def communication(self, trains: bool) -> int:
        """Return the bytes of buffers of process groups and of sequence parallelism."""
        layout = self.layout
        generates = self.role is Role.ACTOR_ROLLOUT and not self.config.parts
        experts = self.architecture.num_experts is not None
        sizes = (layout.tp, layout.pp, layout.dp)
        groups = memory.communicators(*sizes, trains, generates, self.ep, experts)
        groups += POOL_GROUP if is_split(self.config, self.config.pool_of(self.role)) else 0
        held = groups * device.communicator_bytes(self.config.device.kind)
        if self.sequence_parallel:
            hidden = self.architecture.hidden_size
            held += memory.gather_buffer_bytes(self._tokens(self.samples), hidden, self.itemsize)
        return held

    def forward(self) -> Phase:
        """Return the memory of a pass without gradients: one layer at a time."""
        tokens = self._tokens(self.samples)
        layer = memory.layer_forward_bytes(*self._layer_arguments(tokens))
        held = max(layer, self._head(self.samples))
        compares = self.config.algorithm.kl_penalty is KlPenalty.FULL
        beside = Role.ACTOR_ROLLOUT if self.role is Role.REF and compares else None
        return Phase("forward", held, other=self._sent(tokens), beside=beside)

    def update(self, samples: int) -> Phase:
        """Return the memory of an update: activations of the micro-batches in the pipeline.

        samples: samples of an optimizer step on this rank
        """
        tokens, layout, hidden = self._tokens(samples), self.layout, self.architecture.hidden_size
        own = tokens // layout.tp if self.sequence_parallel else tokens
        mlp = memory.mlp_activation_bytes(*self._layer_arguments(tokens))
        entry = own * hidden * self.itemsize
        assert isinstance(self.section, LearningConfig), "frozen roles have no update"
        held, again = memory.chunk_activation_bytes(self.section, self._layer(tokens), mlp, entry)
        if layout.pp > 1:
            held += memory.stage_transfer_bytes(own, hidden, self.itemsize)
        micro_batches = memory.micro_batches(self.section, samples, self.length)
        chunks = self.section.model_chunks
        count = memory.in_flight(self.pp_rank, layout.pp, micro_batches, chunks)
        grouped = self.config.device.kind is not DeviceKind.NPU
        together = (self.architecture.num_experts or 0) // self.ep if grouped else 1
        gradient = memory.weight_gradient_bytes(self.shared, self.experts, together, self.itemsize)
        other = gradient + self._sent(tokens) + self._head_gradient(samples)
        # The head's activations are freed before the backward pass reaches a layer.
        activations = count * held + max(self._head(samples), again)
        return Phase("update", activations, other=other, learns=True)

    def _tokens(self, samples: int) -> int:
        return memory.micro_batch_tokens(self.section, samples, self.length)

    def _layer(self, tokens: int) -> int:
        return memory.layer_activation_bytes(*self._layer_arguments(tokens))

    def _sent(self, tokens: int) -> int:
        """Return the bytes of hidden states that the experts of a layer exchange."""
        return memory.dispatch_bytes(*self._layer_arguments(tokens))

    def _layer_arguments(self, tokens: int) -> tuple[ArchitectureConfig, int, int, bool, int]:
        """Return the arguments that the memory formulas of one layer share."""
        return self.architecture, tokens, self.layout.tp, self.sequence_parallel, self.itemsize

    def _head(self, samples: int) -> int:
        """Return the bytes of hidden states and outputs on the last stage, for a micro-batch."""
        if self.pp_rank < self.layout.pp - 1:
            return 0
        hidden, read = self.architecture.hidden_size, self._read(samples)
        held = memory.last_hidden_bytes(self._tokens(samples), read, hidden, self.itemsize)
        if self.head is Head.SCORE:
            return held + memory.score_head_bytes(read, hidden)
        return held + memory.log_prob_head_bytes(read, self._vocab(), CHUNK_TOKENS)

    def _head_gradient(self, samples: int) -> int:
        """Return the bytes of the fp32 sum of the head's gradient; 0 if a buffer has it."""
        optimizer = optimizer_of(self.config, self.role)
        early = optimizer is not None and optimizer.overlap_grad_reduce and self.section.bf16
        last = self.head is Head.LANGUAGE_MODEL and self.pp_rank == self.layout.pp - 1
        if not (early and last and self._read(samples) > CHUNK_TOKENS):
            return 0
        return memory.head_gradient_bytes(self._vocab(), self.architecture.hidden_size)

    def _read(self, samples: int) -> int:
        """Return the tokens of a micro-batch whose hidden states its head reads."""
        slots = self.response if self.head is Head.LANGUAGE_MODEL else self.response + 1
        return memory.micro_batch_tokens(self.section, samples, slots)

    def _vocab(self) -> int:
        """Return this rank's rows of the vocabulary."""
        return padded_vocab_size(self.architecture, self.layout.tp) // self.layout.tp
