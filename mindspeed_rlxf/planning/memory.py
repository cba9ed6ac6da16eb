"""Memory of a pool's devices: what each role keeps, and what its phases need for a while.

Roles of a pool share a process. What they keep adds up; their phases follow one another, so that
only the largest one counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_rlxf import device
from mindspeed_rlxf.config import memory
from mindspeed_rlxf.config.enums import RewardKind, Role
from mindspeed_rlxf.config.layout import ParallelLayout
from mindspeed_rlxf.config.schema import ActorConfig, CriticConfig, OptimizerConfig, RunConfig
from mindspeed_rlxf.models.heads import CHUNK_TOKENS
from mindspeed_rlxf.models.parameters import Head, padded_vocab_size
from mindspeed_rlxf.models.sizes import HEADS, received_numbers, split_sizes
from mindspeed_rlxf.planning.available import rollout_memory


@dataclass(frozen=True)
class Phase:
    """Bytes that one step of a role needs beside what it keeps."""

    name: str
    activations: int = 0
    kv_cache: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.kv_cache + self.other


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one role on one rank; `other` are lasting communication buffers."""

    role: Role
    weights: int
    gradients: int
    optimizer: int
    other: int
    phases: tuple[Phase, ...]

    @property
    def state(self) -> tuple[int, int, int]:
        """Weights, gradients, optimizer."""
        return self.weights, self.gradients, self.optimizer

    @property
    def kept(self) -> int:
        return sum(self.state) + self.other

    @property
    def largest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True)
class PoolMemory:
    """Bytes of one rank of a pool; `process` is what it takes without any role."""

    pool: str
    rank: int
    roles: tuple[RoleMemory, ...]
    process: int

    @property
    def busiest(self) -> RoleMemory | None:
        """The role with the largest phase; None where no role has a model."""
        return max(self.roles, key=lambda role: role.largest.total, default=None)

    @property
    def total(self) -> int:
        phase = self.busiest.largest.total if self.busiest else 0
        return self.process + sum(role.kept for role in self.roles) + phase


def has_model(config: RunConfig, role: Role) -> bool:
    """False for a reward by rule."""
    return role is not Role.REWARD or config.reward.kind is RewardKind.MODEL


def pool_memory(config: RunConfig, pool: str) -> PoolMemory:
    """The rank of the pool that needs most; the first one of these."""
    roles = [role for role in config.roles_of(pool) if has_model(config, role)]
    process = device.process_bytes(config.device.kind)
    ranks: dict[tuple[int, ...], int] = {}
    for rank in range(config.pool_size(pool)):
        ranks.setdefault(tuple(config.layout(role).pp_rank(rank) for role in roles), rank)
    needs = [
        PoolMemory(
            pool,
            rank,
            tuple(role_memory(config, r, s) for r, s in zip(roles, stages, strict=True)),
            process,
        )
        for stages, rank in ranks.items()
    ]
    return max(needs, key=lambda need: need.total)


def role_memory(config: RunConfig, role: Role, pp_rank: int) -> RoleMemory:
    """A role on the ranks of one pipeline stage."""
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
    )


def cache_rows(config: RunConfig) -> int:
    """Sequences that a rollout replica generates at once."""
    actor, layout = config.actor_rollout, config.layout(Role.ACTOR_ROLLOUT)
    waiting = -(-config.samples_per_iteration // (layout.dp * layout.pp))
    length = actor.max_prompt_length + actor.max_new_tokens
    row = memory.kv_cache_bytes(1, length, actor.architecture, layout.tp, memory.itemsize(actor))
    room = rollout_memory(config, config.pool_of(Role.ACTOR_ROLLOUT))
    return memory.kv_cache_rows(actor.num_samples_per_step, waiting, row, room)


def optimizer_of(config: RunConfig, role: Role) -> OptimizerConfig | None:
    """None for a role that does not learn."""
    section = config.role(role)
    return section.optimizer if isinstance(section, (ActorConfig, CriticConfig)) else None


def _phases(stage: _Stage, optimizer: OptimizerConfig | None) -> Iterator[Phase]:
    config, role = stage.config, stage.role
    yield stage.forward()
    if optimizer:
        yield stage.update(_mini_batch(config, role) // stage.layout.dp)
        distributed = optimizer.use_distributed_optimizer
        roots = [
            memory.optimizer_step_bytes(sum(sizes), replicas if distributed else 1)
            for sizes, replicas in stage.buffers
        ]
        yield Phase("optimizer step", other=max(roots))
    if role is Role.ACTOR_ROLLOUT:
        yield stage.generate(config.actor_rollout, cache_rows(config))


def _mini_batch(config: RunConfig, role: Role) -> int:
    if role is Role.CRITIC:
        return config.value_model.critic_mini_batch_size
    return config.actor_rollout.ppo_mini_batch_size


class _Stage:
    """One role on one pipeline stage, with the sizes that its phases are worked out from."""

    def __init__(self, config: RunConfig, role: Role, pp_rank: int) -> None:
        self.config, self.role, self.pp_rank = config, role, pp_rank
        self.section, self.head = config.role(role), HEADS[role]
        self.layout: ParallelLayout = config.layout(role)
        self.architecture = self.section.architecture
        self.itemsize = memory.itemsize(self.section)
        self.sequence_parallel = self.section.sequence_parallel and self.layout.tp > 1
        self.ep = self.section.expert_model_parallel_size
        place = (pp_rank, self.layout.pp, self.section.model_chunks, self.ep)
        shared, experts = split_sizes(self.architecture, self.head, self.layout.tp, *place)
        self.sizes = shared + experts
        # Parameters that Megatron keeps in one buffer, and the replicas that sum its gradients.
        self.buffers = [(self.sizes, self.layout.dp)]
        if self.ep > 1:
            self.buffers = [(shared, self.layout.dp), (experts, self.layout.dp // self.ep)]
        actor = config.actor_rollout
        self.prompt, self.response = actor.max_prompt_length, actor.max_new_tokens

    def communication(self, trains: bool) -> int:
        layout = self.layout
        generates = self.role is Role.ACTOR_ROLLOUT
        experts = self.architecture.num_experts is not None
        sizes = (layout.tp, layout.pp, layout.dp)
        groups = memory.communicators(*sizes, trains, generates, self.ep, experts)
        held = groups * device.communicator_bytes(self.config.device.kind)
        if self.sequence_parallel:
            hidden = self.architecture.hidden_size
            held += memory.gather_buffer_bytes(self._tokens(self._samples), hidden, self.itemsize)
        return held

    def forward(self) -> Phase:
        """A pass without gradients: one layer at a time."""
        tokens = self._tokens(self._samples)
        held = self._layer(tokens) + self._head(self._samples)
        return Phase("forward", held, other=self._sent(tokens))

    def update(self, samples: int) -> Phase:
        """Forward and backward of one micro-batch, with those that the pipeline has under way.

        samples: of an optimizer step on this rank
        """
        tokens, layout = self._tokens(samples), self.layout
        chunks = self.section.model_chunks
        layers = self.architecture.num_layers // (layout.pp * chunks)
        held = layers * self._layer(tokens)
        if layout.pp > 1:
            own = tokens // layout.tp if self.sequence_parallel else tokens
            held += memory.stage_transfer_bytes(own, self.architecture.hidden_size, self.itemsize)
        micro_batches = memory.micro_batches(self.section, samples, self._length)
        count = memory.in_flight(self.pp_rank, layout.pp, micro_batches, chunks)
        gradient = memory.weight_gradient_bytes(self.sizes, self.itemsize)
        other = gradient + self._sent(tokens)
        return Phase("update", count * held + self._head(samples), other=other)

    def generate(self, actor: ActorConfig, rows: int) -> Phase:
        """The rollout: no pipeline, all experts, so the others' weights are here for a while."""
        a, tp = self.architecture, self.layout.tp
        prefill = memory.prefill_tokens(rows, self.prompt)
        working = memory.layer_activation_bytes(a, prefill, tp, False, self.itemsize)
        working += memory.dispatch_bytes(a, prefill, tp, False, self.itemsize)
        sampling = memory.sampling_bytes(rows, a.vocab_size, actor.do_sample)
        place = (self.pp_rank, self.layout.pp, self.section.model_chunks, self.ep)
        received = received_numbers(a, self.head, tp, *place)
        return Phase(
            "generate",
            max(working, sampling),
            memory.kv_cache_bytes(rows, self._length, a, tp, self.itemsize),
            memory.weight_bytes(received, self.itemsize),
        )

    @property
    def _length(self) -> int:
        return self.prompt + self.response

    @property
    def _samples(self) -> int:
        """Of an iteration on this rank."""
        return self.config.samples_per_iteration // self.layout.dp

    def _tokens(self, samples: int) -> int:
        return memory.micro_batch_tokens(self.section, samples, self._length)

    def _layer(self, tokens: int) -> int:
        return memory.layer_activation_bytes(
            self.architecture, tokens, self.layout.tp, self.sequence_parallel, self.itemsize
        )

    def _sent(self, tokens: int) -> int:
        """Hidden states on their way between the experts of a layer."""
        return memory.dispatch_bytes(
            self.architecture, tokens, self.layout.tp, self.sequence_parallel, self.itemsize
        )

    def _head(self, samples: int) -> int:
        """What the last stage reads from the hidden states of the largest micro-batch."""
        if self.pp_rank < self.layout.pp - 1:
            return 0
        a, hidden = self.architecture, self.architecture.hidden_size
        slots = self.response if self.head is Head.LANGUAGE_MODEL else self.response + 1
        read = memory.micro_batch_tokens(self.section, samples, slots)
        held = memory.last_hidden_bytes(self._tokens(samples), read, hidden, self.itemsize)
        if self.head is Head.SCORE:
            return held + memory.score_head_bytes(read, hidden)
        vocab = padded_vocab_size(a, self.layout.tp) // self.layout.tp
        return held + memory.log_prob_head_bytes(read, vocab, CHUNK_TOKENS)
