"""Compute the memory of a pool's devices: lasting memory of each role, and memory of its phases.

Roles of a pool share a process, so their lasting memory adds up. Their phases follow one another,
so only the largest phase counts. Offloaded state counts only in the phases that use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mindspeed_rlxf import device
from mindspeed_rlxf.config import generation_memory, memory
from mindspeed_rlxf.config.enums import RewardKind, Role
from mindspeed_rlxf.config.layout import count_per_node
from mindspeed_rlxf.config.schema import (
    OffloadConfig,
    OptimizerConfig,
    RunConfig,
)
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.models.sizes import received_numbers, shard_sizes
from mindspeed_rlxf.ops.planning.available import rollout_memory
from mindspeed_rlxf.ops.planning.pipeline_stage import (
    POOL_GROUP,
    Phase,
    PipelineStage,
    is_split,
    optimizer_of,
)
from mindspeed_rlxf.rollout.transfer import BUCKET_BYTES

TRAINS, GENERATES = "ranks that train", "ranks that generate"


State = tuple[int, int, int]
"""Bytes of weights, gradients and optimizer."""


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
        """Return the bytes of weights, gradients and optimizer, offloaded or not."""
        return self.weights, self.gradients, self.optimizer

    def on_device(self, phase: Phase | None = None) -> State:
        """Return the bytes of weights, gradients and optimizer on the device while `phase` runs.

        phase: of this role; None = another role works
        Offloaded weights count only in phases of this role; gradients and optimizer, if offloaded,
        only in phases that learn.
        """
        weights = not self.offload.weights or phase is not None
        rest = not self.offload.optimizer or (phase is not None and phase.learns)
        return self.weights * weights, self.gradients * rest, self.optimizer * rest

    @property
    def copies(self) -> int:
        """Return the bytes of the role's offloaded weights and optimizer in host memory.

        Gradients are not copied.
        """
        offload = self.offload
        return self.weights * offload.weights + self.optimizer * offload.optimizer


@dataclass(frozen=True)
class PoolMemory:
    """Bytes of one rank of a pool.

    roles:     memory of each role with a model
    process:   bytes of the process without roles
    processes: number on each node, of the pool or of its part
    part:      TRAINS or GENERATES if the pool is split, else ""
    """

    pool: str
    rank: int
    roles: tuple[RoleMemory, ...]
    process: int
    processes: tuple[int, ...]  # of the pool, or of the part of it, on each node
    part: str = ""  # of a pool that is split

    @property
    def peak(self) -> tuple[RoleMemory, Phase] | None:
        """Return (role, phase): the phase in which the rank holds most bytes, of all roles.

        None if no role has a model.
        """
        phases = [(role, phase) for role in self.roles for phase in role.phases]
        return max(
            phases, key=lambda each: sum(self.on_device(*each)) + each[1].total, default=None
        )

    def on_device(self, busy: RoleMemory, phase: Phase) -> State:
        """Return weight, gradient and optimizer bytes, each summed over all roles of the rank.

        `busy` runs `phase` meanwhile. The role `phase.beside` has its weights on the device too,
        even if they are offloaded.
        """
        idle = Phase(phase.name)
        found = [
            role.on_device(phase if role is busy else idle if role.role is phase.beside else None)
            for role in self.roles
        ]
        weights, gradients, optimizer = (sum(values) for values in zip(*found, strict=True))
        return weights, gradients, optimizer

    @property
    def total(self) -> int:
        """Return the most bytes that the rank's device needs at any time."""
        needed = sum(self.on_device(*self.peak)) + self.peak[1].total if self.peak else 0
        return self.process + sum(role.other for role in self.roles) + needed

    @property
    def copies(self) -> int:
        """Return the bytes of offloaded state in host memory, for this rank."""
        return sum(role.copies for role in self.roles)


def has_model(config: RunConfig, role: Role) -> bool:
    """Whether a role computes with a model; False for a reward by rule."""
    return role is not Role.REWARD or config.reward.kind is RewardKind.MODEL


def pool_memories(config: RunConfig, pool: str) -> list[PoolMemory]:
    """Return the memory of a pool in a list of one item: of the rank with the largest need.

    A split pool has two items: of its ranks that train, then of those that generate.
    """
    if not is_split(config, pool):
        return [pool_memory(config, pool)]
    return [replace(pool_memory(config, pool), part=TRAINS), _generating_rank(config, pool)]


def _generating_rank(config: RunConfig, pool: str) -> PoolMemory:
    """Return the memory of a rank of a split pool's part that only generates.

    Counts all layers, divided by the rollout's TP and EP, the buffers that receive weights, the KV
    cache, the communicators and the process.
    """
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
    """Return the memory of a phase that sends or receives weights between the parts of a pool.

    weights: bytes of all weights that are sent or received
    """
    return Phase(name, other=min(BUCKET_BYTES, weights))


def generate_phase(config: RunConfig, received: int) -> Phase:
    """Return the memory of generation on a rank: working memory, KV cache and received weights.

    The rank has every layer and its share of experts.
    received: number of weights held during generation only, beside those the rank trains
    """
    actor, tp = config.actor_rollout, config.rollout_tp
    rows, held = cache_rows(config), _cache_tokens(config)
    a, item = actor.architecture, memory.itemsize(actor)
    length = actor.max_prompt_length + actor.max_new_tokens
    # With a limited cache, rows that had to wait are prefilled again with their drawn tokens.
    prefill = generation_memory.prefill_tokens(
        rows, actor.max_prompt_length if held is None else length
    )
    layer = a, prefill, tp, False, item
    working = memory.layer_activation_bytes(*layer)
    if config.rollout_ep > 1:
        working -= memory.mlp_activation_bytes(*layer)
        working += generation_memory.exchange_bytes(a, prefill, tp, config.rollout_ep, item)
    else:
        working += memory.dispatch_bytes(*layer)
    top_ps = [actor.top_p] if actor.do_sample else []
    if config.has_validation_prompts and config.validation.do_sample:
        top_ps.append(config.validation.top_p)
    sorts = min(top_ps, default=1.0) < 1
    sampling = generation_memory.sampling_bytes(rows, a.vocab_size, bool(top_ps), sorts)
    return Phase(
        "generate",
        max(working, sampling) + generation_memory.row_state_bytes(rows, actor.max_new_tokens),
        generation_memory.kv_cache_bytes(
            generation_memory.kv_cache_most_tokens(rows, length, held), a, tp, item
        ),
        memory.weight_bytes(received, item),
    )


def pool_memory(config: RunConfig, pool: str) -> PoolMemory:
    """Return the memory of the pool's rank with the largest need, without ranks that only generate.

    Of equal ranks, the first.
    """
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
    """Return the memory of a role on one rank of a pipeline stage: lasting bytes and its phases.

    Gradients and optimizer state are 0 for a role that does not learn.
    """
    stage = PipelineStage(config, role, pp_rank)
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
        stage.communication_bytes(trains=optimizer is not None),
        tuple(_phases(stage, optimizer)),
        stage.section.offload,
    )


def cache_rows(config: RunConfig) -> int:
    """Return the number of sequences that a rollout replica generates at once.

    At most `num_samples_per_step`; if unset, as many as fit into the KV cache with the longest
    prompt and half a response each, at least one (all if the memory is unknown). Never more than
    the replica's samples of an iteration.
    """
    actor = config.actor_rollout
    waiting = -(-config.samples_per_iteration // config.rollout_layout.dp)
    sizes = actor.max_prompt_length, actor.max_new_tokens
    return generation_memory.kv_cache_rows(
        actor.num_samples_per_step, waiting, *sizes, _cache_tokens(config)
    )


def _cache_tokens(config: RunConfig) -> int | None:
    """Return how many tokens the KV cache of a rollout replica may have; None = no limit.

    There is no limit if `num_samples_per_step` is set, or the memory of the device is unknown.
    """
    actor, tp = config.actor_rollout, config.rollout_tp
    token = generation_memory.kv_cache_bytes(1, actor.architecture, tp, memory.itemsize(actor))
    limited = actor.num_samples_per_step is None
    return generation_memory.kv_cache_tokens(token, rollout_memory(config) if limited else None)


def _phases(stage: PipelineStage, optimizer: OptimizerConfig | None) -> Iterator[Phase]:
    """Yield the memory of a role's phases.

    Forward. If the role learns: update, optimizer step. For the actor: sending the weights if its
    pool is split, else generation.
    optimizer: None = the role does not learn
    """
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
