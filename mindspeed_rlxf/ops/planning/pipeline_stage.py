"""Compute the memory of one role on one of its pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rlxf import device
from mindspeed_rlxf.config import memory
from mindspeed_rlxf.config.enums import DeviceKind, KlPenalty, Role
from mindspeed_rlxf.config.layout import ParallelLayout
from mindspeed_rlxf.config.schema import (
    ArchitectureConfig,
    LearningConfig,
    OptimizerConfig,
    RunConfig,
)
from mindspeed_rlxf.models.heads import CHUNK_TOKENS
from mindspeed_rlxf.models.parameters import Head, padded_vocab_size
from mindspeed_rlxf.models.sizes import HEADS, split_sizes

POOL_GROUP = 1  # a split pool has one more communicator, for weights


@dataclass(frozen=True)
class Phase:
    """Bytes that a phase of a role needs in addition to the role's lasting memory.

    learns: the phase also uses gradients and optimizer
    beside: another role whose weights must be on the device too
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


def is_split(config: RunConfig, pool: str) -> bool:
    """Whether some ranks of the pool train the actor and the others only generate."""
    return config.parts is not None and pool == config.pool_of(Role.ACTOR_ROLLOUT)


def optimizer_of(config: RunConfig, role: Role) -> OptimizerConfig | None:
    """Return the settings of a role's optimizer; None if the role does not learn."""
    section = config.role(role)
    return section.optimizer if isinstance(section, LearningConfig) else None


class PipelineStage:
    """One role on one pipeline stage, with the sizes that its memory depends on."""

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

    def communication_bytes(self, trains: bool) -> int:
        """Return the bytes of buffers of all process groups, and of sequence parallelism if used.

        Groups of generation count for an actor whose pool is not split in training and generation;
        in a split pool it has one more group, of the whole pool.
        trains: the role has an optimizer, which needs groups of its own
        """
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
        """Return the memory of a pass without gradients: of one layer, or of the head if larger.

        Buffers of experts are added. A reference that computes the full KL also needs the actor's
        weights on the device meanwhile.
        """
        tokens = self._tokens(self.samples)
        layer = memory.layer_forward_bytes(*self._layer_arguments(tokens))
        held = max(layer, self._head_bytes(self.samples))
        compares = self.config.algorithm.kl_penalty is KlPenalty.FULL
        beside = Role.ACTOR_ROLLOUT if self.role is Role.REF and compares else None
        return Phase("forward", held, other=self._dispatch_bytes(tokens), beside=beside)

    def update(self, samples: int) -> Phase:
        """Return the memory of the forward and backward passes of an update.

        That is the activations of the micro-batches in flight, and the gradients in computation.
        samples: number of samples of an optimizer step on this rank
        """
        tokens, layout, hidden = (
            self._tokens(samples),
            self.layout,
            self.architecture.hidden_size,
        )
        own = tokens // layout.tp if self.sequence_parallel else tokens
        layer = memory.layer_activation_bytes(*self._layer_arguments(tokens))
        mlp = memory.mlp_activation_bytes(*self._layer_arguments(tokens))
        entry = own * hidden * self.itemsize
        assert isinstance(self.section, LearningConfig), "frozen roles have no update"
        held, again = memory.chunk_activation_bytes(self.section, layer, mlp, entry)
        if layout.pp > 1:
            held += memory.stage_transfer_bytes(own, hidden, self.itemsize)
        micro_batches = memory.micro_batches(self.section, samples, self.length)
        chunks = self.section.model_chunks
        count = memory.in_flight(self.pp_rank, layout.pp, micro_batches, chunks)
        grouped = device.resolve_kind(self.config.device.kind) is not DeviceKind.NPU
        together = (self.architecture.num_experts or 0) // self.ep if grouped else 1
        gradient = memory.weight_gradient_bytes(self.shared, self.experts, together, self.itemsize)
        other = gradient + self._dispatch_bytes(tokens) + self._head_gradient_bytes(samples)
        # The head's activations are freed before the backward pass reaches a layer.
        activations = count * held + max(self._head_bytes(samples), again)
        return Phase("update", activations, other=other, learns=True)

    def _tokens(self, samples: int) -> int:
        """Return the tokens of a rank's largest micro-batch of `samples`."""
        return memory.micro_batch_tokens(self.section, samples, self.length)

    def _dispatch_bytes(self, tokens: int) -> int:
        """Return the bytes that the experts of a layer exchange; 0 without experts."""
        return memory.dispatch_bytes(*self._layer_arguments(tokens))

    def _layer_arguments(self, tokens: int) -> tuple[ArchitectureConfig, int, int, bool, int]:
        """Return the arguments that the memory formulas of one layer share."""
        return self.architecture, tokens, self.layout.tp, self.sequence_parallel, self.itemsize

    def _head_bytes(self, samples: int) -> int:
        """Return the bytes of a micro-batch's last hidden states and of the head's outputs.

        Those are scores, or log-probs in chunks of tokens. 0 before the last stage.
        """
        if self.pp_rank < self.layout.pp - 1:
            return 0
        hidden, read = self.architecture.hidden_size, self._head_tokens(samples)
        held = memory.last_hidden_bytes(self._tokens(samples), read, hidden, self.itemsize)
        if self.head is Head.SCORE:
            return held + memory.score_head_bytes(read, hidden)
        return held + memory.log_prob_head_bytes(read, self._vocab_rows(), CHUNK_TOKENS)

    def _head_gradient_bytes(self, samples: int) -> int:
        """Return the bytes of the fp32 sum of the head's gradient; 0 if no such sum is made.

        It is made on the last stage of a language model that learns in bf16 with
        overlap_grad_reduce, if the head reads more than one chunk of tokens.
        """
        optimizer = optimizer_of(self.config, self.role)
        early = optimizer is not None and optimizer.overlap_grad_reduce and self.section.bf16
        last = self.head is Head.LANGUAGE_MODEL and self.pp_rank == self.layout.pp - 1
        if not (early and last and self._head_tokens(samples) > CHUNK_TOKENS):
            return 0
        return memory.head_gradient_bytes(self._vocab_rows(), self.architecture.hidden_size)

    def _head_tokens(self, samples: int) -> int:
        """Return the tokens of a micro-batch that the head reads.

        They are those of responses, and for other heads than the language model one more a sample.
        """
        slots = self.response if self.head is Head.LANGUAGE_MODEL else self.response + 1
        return memory.micro_batch_tokens(self.section, samples, slots)

    def _vocab_rows(self) -> int:
        """Return this rank's rows of the padded vocabulary."""
        return padded_vocab_size(self.architecture, self.layout.tp) // self.layout.tp
