"""Compute device memory per pool: each role's lasting memory, and its phases.

Roles in a pool share a process, so their lasting memory adds up. Their phases follow one another,
so only the largest counts. Offloaded state counts only in phases that use it.
"""

from dataclasses import dataclass, replace
from math import prod

from mindspeed_rlxf import device
from mindspeed_rlxf.config import generation_memory
from mindspeed_rlxf.config.enums import RewardKind, Role
from mindspeed_rlxf.config.rank_layout import count_per_node
from mindspeed_rlxf.config.schema import OffloadConfig, RunConfig
from mindspeed_rlxf.models.parameter_counts import (
    adapter_sizes,
    joined_elements,
    received_elements,
    shard_sizes,
)
from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.ops.planning.available import device_memory, on_cpu, rollout_memory
from mindspeed_rlxf.ops.planning.sharded_memory import ShardedModel
from mindspeed_rlxf.ops.planning.stage_memory import (
    FP32,
    POOL_GROUP,
    Phase,
    PipelineStage,
    State,
    fp32_weight_bytes,
    is_split,
    itemsize,
    layer_bytes,
)
from mindspeed_rlxf.rollout.rollout_engine import NATIVE
from mindspeed_rlxf.rollout.server_sizes import (
    server_cache_bytes,
    server_rows,
    server_weight_bytes,
)
from mindspeed_rlxf.rollout.transfer import make_buckets

TRAINS = "ranks that train"
GENERATES = "ranks that generate"


@dataclass(frozen=True)
class RoleMemory:
    """One role's bytes on one rank: `state`, offloaded or not, communication buffers and phases."""

    role: Role
    state: State
    other: int
    phases: tuple[Phase, ...]
    offload: OffloadConfig

    def on_device(self, phase: Phase | None = None) -> State:
        """Return the state on the device while `phase` runs; None = another role works.

        Offloaded weights count only in this role's phases; offloaded gradients and optimizer only
        in learning phases.
        """
        learns = phase is not None and phase.learns
        has_weights = not self.offload.weights or phase is not None
        has_optimizer = not self.offload.optimizer or learns
        weights, gradients, optimizer = self.state
        return State(weights * has_weights, gradients * has_optimizer, optimizer * has_optimizer)

    @property
    def copies(self) -> int:
        """Offloaded weights and optimizer in host memory, in bytes; gradients have no copy."""
        offload = self.offload
        return self.state.weights * offload.weights + self.state.optimizer * offload.optimizer


@dataclass(frozen=True)
class PoolMemory:
    """One pool rank's bytes.

    Attributes:
        process: The process without roles.
        processes: Processes on each node: the pool's, or those of `ranks`.
        ranks: TRAINS or GENERATES in a split pool, else "".
    """

    pool: str
    rank: int
    roles: tuple[RoleMemory, ...]
    process: int
    processes: tuple[int, ...]
    ranks: str = ""

    @property
    def peak(self) -> tuple[RoleMemory, Phase] | None:
        """The role and phase with most bytes on the rank; None if no role has a model."""
        peak = None
        max_bytes = -1
        for role in self.roles:
            for phase in role.phases:
                num_bytes = sum(self.on_device(role, phase)) + phase.total
                if num_bytes > max_bytes:
                    peak = role, phase
                    max_bytes = num_bytes
        return peak

    def on_device(self, busy: RoleMemory, phase: Phase) -> State:
        """Sum all roles' state on the device while `busy` runs `phase`.

        Weights for role `phase.beside` are on the device too, even if they are offloaded.
        """
        weights = 0
        gradients = 0
        optimizer = 0
        for role in self.roles:
            if role is busy:
                state = role.on_device(phase)
            elif role.role is phase.beside:
                state = role.on_device(Phase(phase.name))
            else:
                state = role.on_device(None)
            weights += state.weights
            gradients += state.gradients
            optimizer += state.optimizer
        return State(weights, gradients, optimizer)

    @property
    def total(self) -> int:
        """The rank's peak in bytes."""
        total = self.process + sum(role.other for role in self.roles)
        peak = self.peak
        if peak is not None:
            total += sum(self.on_device(*peak)) + peak[1].total
        return total


def has_model(config: RunConfig, role: Role) -> bool:
    """Return whether a role computes with a model; False for a rule reward."""
    return role is not Role.REWARD or config.reward.kind is RewardKind.MODEL


def pool_memories(config: RunConfig) -> list[PoolMemory]:
    """Compute each pool's memory on its rank with the largest need.

    A disaggregated pool has two items: for its training ranks, then for its generating ranks.
    """
    memories = []
    for pool in config.resource_pool:
        memory = pool_memory(config, pool)
        if is_split(config, pool):
            memories += [replace(memory, ranks=TRAINS), _generating_memory(config, pool)]
        else:
            memories.append(memory)
    return memories


def _generating_memory(config: RunConfig, pool: str) -> PoolMemory:
    """Compute the memory on a disaggregated pool's generating ranks."""
    assert config.train_rollout_split is not None, "the pool is split"
    actor = config.actor_rollout
    tp = config.rollout_tp
    ep = config.rollout_ep
    numbers = sum(shard_sizes(actor.architecture, Head.LANGUAGE_MODEL, tp, 0, 1, 1, ep))
    numbers += _adapter_elements(config, tp)
    groups = (2 if actor.architecture.num_experts else 1) * (tp > 1) + (ep > 1) + POOL_GROUP
    rollout = RoleMemory(
        Role.ACTOR_ROLLOUT,
        State(numbers * itemsize(actor), 0, 0),
        groups * device.communicator_bytes(config.device.kind),
        (Phase("receive weights", other=bucket_bytes(config)), *_generate_phases(config, 0)),
        OffloadConfig(),
    )
    return PoolMemory(
        pool,
        config.train_rollout_split[0],
        (replace(rollout, state=State(0, 0, 0)), server_memory(config))
        if config.runs_vllm
        else (rollout,),
        device.process_bytes(config.device.kind),
        tuple(count_per_node(config.resource_pool[pool], *config.train_rollout_split)),
        GENERATES,
    )


def server_memory(config: RunConfig) -> RoleMemory:
    """Compute a vLLM server's memory on one of its ranks: weights and KV cache.

    On CPU a server does not sleep. On devices it has its share while training makes room.
    """
    weights = server_weight_bytes(config)
    cache = server_cache_bytes(config, on_cpu(config), device_memory(config) or 0)
    if on_cpu(config):
        phase = Phase("vLLM server")
        lasting = cache + weights
    else:
        phase = Phase("vLLM server", kv_cache=cache, other=weights)
        lasting = 0
    return RoleMemory(Role.ROLLOUT, State(0, 0, 0), lasting, (phase,), OffloadConfig())


def bucket_bytes(config: RunConfig) -> int:
    """Return the bytes in a disaggregated pool's largest weight bucket."""
    actor = config.actor_rollout
    buckets = make_buckets(hf_shapes(actor.architecture, Head.LANGUAGE_MODEL), itemsize(actor))
    return itemsize(actor) * max(sum(map(prod, bucket.values())) for bucket in buckets)


def pool_memory(config: RunConfig, pool: str) -> PoolMemory:
    """Compute memory on the pool's rank with the largest need, the first if equal."""
    roles = [role for role in config.roles_of(pool) if has_model(config, role)]
    processes = tuple(config.processes_of(config.roles_of(pool)[0]))
    ranks: dict[tuple[int, ...], int] = {}  # stage in each role -> first rank with these
    for rank in range(sum(processes)):
        ranks.setdefault(tuple(config.layout(role).pp_rank(rank) for role in roles), rank)
    has_server = config.runs_vllm and Role.ACTOR_ROLLOUT in roles and not config.train_rollout_split
    process_bytes = device.process_bytes(config.device.kind)
    memories = []
    for stages, rank in ranks.items():
        roles_memory = []
        for role, stage in zip(roles, stages, strict=True):
            roles_memory.append(role_memory(config, role, stage))
        if has_server:
            roles_memory.append(server_memory(config))
        memories.append(PoolMemory(pool, rank, tuple(roles_memory), process_bytes, processes))
    return max(memories, key=lambda memory: memory.total)


def role_memory(config: RunConfig, role: Role, pp_rank: int) -> RoleMemory:
    """Compute a role's lasting bytes and phases on one pipeline stage.

    Frozen roles have no gradients and optimizer, and a reference that is the actor without its
    adapters no weights. The actor also generates, or sends its weights if its pool is split.
    """
    if config.role(role).backend == "fsdp":
        return _sharded_memory(config, role)
    stage = PipelineStage(config, role, pp_rank)
    phases = list(stage.phases())
    if role is Role.ACTOR_ROLLOUT and config.train_rollout_split:
        # The first rank has the tensors of a bucket, and the bucket; the others make its tensors.
        copies = 2 if pp_rank == 0 else 1
        phases.append(Phase("send weights", other=copies * bucket_bytes(config)))
    elif role is Role.ACTOR_ROLLOUT:
        # Weights and adapters of other stages, on a rank that also generates.
        adapters = _adapter_elements(config, stage.layout.tp) - sum(stage.adapters)
        received = received_elements(*stage.shard) + adapters
        phases += _generate_phases(config, received)
    offload = OffloadConfig() if stage.is_shared else stage.section.offload
    return RoleMemory(role, stage.state(), stage.communication_bytes(), tuple(phases), offload)


def _sharded_memory(config: RunConfig, role: Role) -> RoleMemory:
    model = ShardedModel(config, role)
    phases = list(model.phases())
    if role is Role.ACTOR_ROLLOUT:  # generation has a whole model, and gathers one tensor at a time
        phases += _generate_phases(config, model.numbers + model.adapters + model.root)
    offload = OffloadConfig() if model.is_shared else model.section.offload
    return RoleMemory(role, model.state(), model.communication_bytes(), tuple(phases), offload)


def _adapter_elements(config: RunConfig, tp: int) -> int:
    """Count the elements of all the actor's adapters on one of `tp` ranks."""
    actor = config.actor_rollout
    return sum(adapter_sizes(actor.architecture, Head.LANGUAGE_MODEL, actor.lora, tp))


def _generate_phases(config: RunConfig, received: int) -> list[Phase]:
    """Compute generation's memory on a rank; it has every layer and its own experts.

    `received` counts weight elements that it does not share with training. Servers have their own.
    """
    if config.runs_vllm:
        return []
    actor = config.actor_rollout
    a = actor.architecture
    tp = config.rollout_tp
    item = itemsize(actor)
    rows = cache_rows(config)
    cache_tokens = _cache_tokens(config)
    length = actor.max_prompt_length + actor.max_new_tokens
    # With a limited cache, rows that had to wait are prefilled again with their drawn tokens.
    longest = actor.max_prompt_length if cache_tokens is None else length
    prefill = min(rows * longest, max(generation_memory.PREFILL_TOKENS, longest))
    layer = layer_bytes(a, prefill, tp, False, item)
    working = layer.kept + layer.sent
    if actor.lora.rank:  # what adapters add to the output of the widest linear
        working += prefill * a.mlp_hidden_size // tp * item
    if config.rollout_ep > 1:
        hidden = a.hidden_size
        width = a.mlp_hidden_size // tp
        # Of this rank's tokens: hidden states and routing. Of a chunk of all ranks': the result,
        # and what each chosen expert needs.
        routing = 5 * (a.num_experts or 0) + 20 * a.moe_router_topk
        rank_bytes = prefill * (hidden * item + routing)
        result = hidden * (item + FP32)
        widened = (hidden + 2 * width) * item
        choice = 40 + max(result, widened, width * (3 * item + FP32))
        chunk_tokens = max(1, generation_memory.EXCHANGE_TOKENS // config.rollout_ep)
        num_exchanged = config.rollout_ep * min(prefill, chunk_tokens)
        exchange_bytes = num_exchanged * (result + a.moe_router_topk * choice)
        working = layer.kept - layer.mlp + rank_bytes + exchange_bytes
    top_ps = [actor.top_p] if actor.do_sample else []
    if config.has_validation_prompts and config.validation.do_sample:
        top_ps.append(config.validation.top_p)
    sampling = rows * a.vocab_size * sampling_itemsize(bool(top_ps), min(top_ps, default=1) < 1)
    sampling += fp32_weight_bytes(config, actor, -(-a.vocab_size // tp))
    peak = max(working, sampling)
    if config.makes_decode_graphs:
        peak += sampling  # graphs keep what a draw needs, also while others run without them
    # Token id, log-prob and random number of each position.
    state = rows * (actor.max_new_tokens + 1) * (8 + FP32 + FP32)
    tokens = rows * length
    if cache_tokens is not None:
        tokens = min(tokens, max(cache_tokens, length))
    cache = generation_memory.kv_cache_bytes(tokens, a, tp, item)
    if config.rollout.engine == NATIVE and actor.lora.rank:
        received += joined_elements(a, actor.lora, tp)
    return [Phase("generate", peak + state, cache, received * item)]


def sampling_itemsize(do_sample: bool, sorts: bool) -> int:
    """Return the peak bytes per logit when drawing tokens; `sorts` if a top_p is below 1.

    Greedy: 3 fp32 arrays (logits, scaled logits, log-softmax). Sampling: 7, with the filtered
    logits and weights; top_p adds 8-byte token ids.
    """
    return (7 if do_sample else 3) * FP32 + (8 if sorts else 0)


def cache_rows(config: RunConfig) -> int:
    """Return how many sequences a rollout replica generates at once.

    At most `num_samples_per_step`; if unset, as many as fit into the KV cache with the longest
    prompt and half a response each, at least one (all if the memory is unknown). Never more than
    the replica's samples in an iteration. A vLLM server has a rule of its own (`server_rows`).
    """
    actor = config.actor_rollout
    waiting = -(-config.samples_per_iteration // config.rollout_layout.dp)
    if config.runs_vllm:
        return min(server_rows(config, on_cpu(config), device_memory(config)), waiting)
    sizes = actor.max_prompt_length, actor.max_new_tokens
    return generation_memory.kv_cache_rows(
        actor.num_samples_per_step, waiting, *sizes, _cache_tokens(config)
    )


def _cache_tokens(config: RunConfig) -> int | None:
    actor = config.actor_rollout
    if actor.num_samples_per_step is not None:
        return None
    tp = config.rollout_tp
    token_bytes = generation_memory.kv_cache_bytes(1, actor.architecture, tp, itemsize(actor))
    return generation_memory.kv_cache_tokens(token_bytes, rollout_memory(config))
