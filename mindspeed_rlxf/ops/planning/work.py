"""Count the work of each phase of an iteration on its busiest rank: FLOP, bytes, calls.

Formulas are in `docs/planning.md`. Prompts and responses have the mean lengths of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import lru_cache

from mindspeed_rlxf.config import generation_memory, memory
from mindspeed_rlxf.config.enums import Recompute, Role
from mindspeed_rlxf.config.layout import ParallelLayout
from mindspeed_rlxf.config.schema import ArchitectureConfig, LearningConfig, RoleConfig, RunConfig
from mindspeed_rlxf.data.balance import layer_matrices
from mindspeed_rlxf.models.heads import CHUNK_TOKENS
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.models.sizes import HEADS, received_numbers, shard_sizes
from mindspeed_rlxf.ops.planning.memory import cache_rows, has_model


class Kind(Enum):
    """Kinds of work, each with costs of its own."""

    FORWARD = "forward"
    UPDATE = "update"
    GENERATE = "generate"


class Stage(Enum):
    """Stages of an iteration, one after the other; pools work in parallel within a stage."""

    GENERATE = 0
    SCORE = 1
    UPDATE = 2


@dataclass(frozen=True)
class Work:
    """Amount of work of one rank.

    flop:     floating-point operations of matrices and attention
    moved:    bytes of the device's memory read or written
    calls:    number of calls of a layer
    link:     bytes sent to devices of the same host
    network:  bytes sent to other hosts
    host:     bytes copied between device and host memory
    messages: number of collectives
    """

    flop: float = 0.0
    moved: float = 0.0
    calls: float = 0.0
    link: float = 0.0
    network: float = 0.0
    host: float = 0.0
    messages: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, factor: float) -> Work:
        """Return this work with every amount multiplied by `factor`."""
        return Work(*(getattr(self, f.name) * factor for f in fields(self)))


@dataclass(frozen=True)
class PhaseWork:
    """Work of one phase of a role, on the busiest rank. name: as in the metric `timing/NAME`"""

    name: str
    role: Role
    pool: str
    kind: Kind
    stage: Stage
    work: Work


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a prompt and of a response."""

    prompt: int
    response: int

    @property
    def total(self) -> int:
        return self.prompt + self.response


def mean_lengths(config: RunConfig) -> Lengths:
    """Return the mean lengths of prompt and response from `plan`, at most the actor's limits.

    A length that is unset is the limit.
    """
    actor, given = config.actor_rollout, config.plan
    return Lengths(
        min(given.prompt_tokens or actor.max_prompt_length, actor.max_prompt_length),
        min(given.response_tokens or actor.max_new_tokens, actor.max_new_tokens),
    )


def iteration_work(config: RunConfig) -> list[PhaseWork]:
    """Return the work of all phases of an iteration: generation, forward passes, updates.

    Forward passes are of each role with a model, in the order actor (only if old log-probs are
    computed again), reference, critic, reward. The critic's update is before the actor's.
    """
    lengths = mean_lengths(config)
    actor = Role.ACTOR_ROLLOUT
    found = [_phase(config, "gen", actor, Kind.GENERATE, Stage.GENERATE, generation_work(config))]
    names = {actor: "old_log_prob", Role.REF: "ref", Role.CRITIC: "values", Role.REWARD: "reward"}
    for role, name in names.items():
        reads = role is not actor or config.old_log_probs.value == "recompute"
        if role in config.roles and has_model(config, role) and reads:
            work = _ModelWork(config, role, lengths).all_samples()
            found.append(_phase(config, name, role, Kind.FORWARD, Stage.SCORE, work))
    for role in (Role.CRITIC, actor):
        if role in config.roles:
            name = "update_critic" if role is Role.CRITIC else "update_actor"
            work = _ModelWork(config, role, lengths).updates()
            found.append(_phase(config, name, role, Kind.UPDATE, Stage.UPDATE, work))
    return found


def _phase(
    config: RunConfig, name: str, role: Role, kind: Kind, stage: Stage, work: Work
) -> PhaseWork:
    return PhaseWork(name, role, config.pool_of(role), kind, stage, work)


@lru_cache(maxsize=4096)
def _numbers(a: ArchitectureConfig, head: Head, tp: int, pp_rank: int, pp: int, ep: int = 1) -> int:
    """Count the parameters of a rank; a pass reads all of them."""
    return sum(shard_sizes(a, head, tp, pp_rank, pp, 1, ep))


def layer_flop(a: ArchitectureConfig, tokens: float, tp: int) -> tuple[float, float]:
    """Return the FLOP of one layer's matrices for `tokens` on a rank: (all, those of the MLP)."""
    attention, mlp = layer_matrices(a)
    return 2 * tokens * (attention + mlp) / tp, 2 * tokens * mlp / tp


def attention_flop(a: ArchitectureConfig, queries: float, context: float, tp: int) -> float:
    """Return the FLOP of one layer's attention scores and values on a rank.

    context: mean number of tokens that a query attends to
    """
    return 4 * queries * context * a.num_attention_heads * a.head_dim / tp


def _spans_hosts(config: RunConfig, role: Role, size: int) -> bool:
    """Return whether `size` consecutive ranks of a role are more than its smallest host has."""
    return size > min(config.processes_of(role))


def _ring_factor(size: int) -> float:
    """Return the bytes that a rank sends per byte of a ring all-reduce among `size` ranks."""
    return 2 * (size - 1) / size


class _ModelWork:
    """Counts the work of one rank of a role's model on the busiest pipeline stage.

    That is the last one, with the head. Parameters are counted as if each rank had all experts.
    """

    def __init__(self, config: RunConfig, role: Role, lengths: Lengths) -> None:
        self.config, self.role, self.lengths = config, role, lengths
        self.section: RoleConfig = config.role(role)
        self.layout: ParallelLayout = config.layout(role)
        self.a, self.head = self.section.architecture, HEADS[role]
        self.item = memory.itemsize(self.section)
        self.layers = self.a.num_layers // self.layout.pp
        self.last = self.layout.pp - 1
        self.numbers = _numbers(self.a, self.head, self.layout.tp, self.last, self.layout.pp)

    def all_samples(self) -> Work:
        """Return the work of a forward pass over this rank's samples, and offload copies."""
        samples = self.config.samples_per_iteration // self.layout.dp
        return self._forward_work(samples, head_passes=1) + self._offload_copies(trains=False)

    def updates(self) -> Work:
        """Return the work of all updates of an iteration, forward and backward passes included.

        Copies of what the role offloads count once.
        """
        config, section = self.config, self.section
        assert isinstance(section, LearningConfig), "frozen roles have no update"
        if self.role is Role.CRITIC:
            size, epochs = (
                config.value_model.critic_mini_batch_size,
                config.value_model.critic_update_epochs,
            )
        else:
            size, epochs = config.actor_rollout.ppo_mini_batch_size, config.actor_rollout.ppo_epochs
        steps = config.samples_per_iteration // size * epochs
        step = self._step_work(size // self.layout.dp, section)
        return step.times(steps) + self._offload_copies(trains=True)

    def _step_work(self, samples: int, section: LearningConfig) -> Work:
        """Return the work of one optimizer step on `samples` samples of this rank.

        It has forward, backward and recomputation of all micro-batches, the head, adding up the
        gradients on the device, their sum over ranks, and the optimizer.
        """
        tokens = min(samples, self._samples_at_once(samples)) * self.lengths.response
        # The backward pass computes chunks of the log-prob head a second time.
        head = 4 if self.head is Head.LANGUAGE_MODEL and tokens > CHUNK_TOKENS else 3
        once = self._forward_work(samples, head_passes=0)
        passes = 3.0
        again = Work()
        if section.recompute is Recompute.FULL:
            passes = 4.0
        elif section.recompute is Recompute.SELECTIVE:
            everything, mlp = layer_flop(self.a, 1, 1)
            again = replace(once.times(mlp / everything), link=0.0, messages=0.0, network=0.0)
        count = self._micro_batches(samples)
        fp32 = memory.FP32
        summed = Work(moved=count * self.numbers * (2 * fp32 + self.item))
        work = once.times(passes) + again + self._head_work(samples, head) + summed
        return work + self._optimizer_work(section) + self._gradient_sum_work(section)

    def _forward_work(self, samples: int, head_passes: int) -> Work:
        """Return the work of a forward pass with the idle time of the pipeline.

        head_passes: passes of the output layer to include; 0 = without it
        """
        a, tp, length = self.a, self.layout.tp, self.lengths.total
        tokens, count = samples * length, self._micro_batches(samples)
        flop = layer_flop(a, tokens, tp)[0] + attention_flop(a, tokens, length / 2, tp)
        hidden = tokens * a.hidden_size * self.item  # bytes of the hidden states
        sequence_parallel = self.section.sequence_parallel and tp > 1
        kept = memory.layer_activation_bytes(a, tokens, tp, sequence_parallel, self.item)
        layer = Work(flop=flop, moved=2 * kept, calls=count)
        if tp > 1:
            layer += self._transfer_work(2 * hidden * _ring_factor(tp), 2 * count, tp)
        weights = Work(moved=count * self.numbers * self.item)
        work = layer.times(self.layers) + weights
        if head_passes:
            work += self._head_work(samples, head_passes)
        if (pp := self.layout.pp) > 1:
            work += self._transfer_work(hidden, count, pp * tp * self.layout.dp)
            work = work.times((count + pp - 1) / count)
        return work

    def _head_work(self, samples: int, passes: int) -> Work:
        """Return the work of `passes` passes of the output layer over the responses of `samples`.

        The vocabulary is divided among tensor-parallel ranks; a score head has one output, is not
        divided, and moves no bytes.
        """
        read = samples * self.lengths.response
        if self.head is Head.SCORE:
            return Work(flop=2 * passes * read * self.a.hidden_size, calls=passes)
        vocab = self.a.vocab_size / self.layout.tp
        flop = 2 * passes * read * self.a.hidden_size * vocab
        return Work(flop=flop, moved=passes * read * vocab * 4 * memory.FP32, calls=passes)

    def _optimizer_work(self, section: LearningConfig) -> Work:
        """Return the work of the optimizer on this rank's parameters or shard, for one step."""
        distributed = section.optimizer.use_distributed_optimizer
        mine = self.numbers / (self.layout.dp if distributed else 1)
        state = 2 * memory.optimizer_number_bytes(self.item) + 2 * memory.FP32 + self.item
        # Gradients are set to zero, read for the norm, and scaled when clipped.
        return Work(moved=mine * state + 4 * self.numbers * memory.FP32, calls=self.layers)

    def _gradient_sum_work(self, section: LearningConfig) -> Work:
        """Return the work of summing gradients over data-parallel ranks; empty for one rank.

        With a distributed optimizer, it includes gathering the weights.
        """
        dp = self.layout.dp
        if dp == 1:
            return Work()
        sent = self.numbers * memory.FP32 * _ring_factor(dp)
        if section.optimizer.use_distributed_optimizer:
            sent = self.numbers * (memory.FP32 + self.item) * _ring_factor(dp) / 2
        return self._transfer_work(sent, 2, dp * self.layout.tp)

    def _transfer_work(self, count: float, messages: float, ranks: int) -> Work:
        """Return the work of sending `count` bytes in `messages` collectives.

        ranks: number of consecutive ranks involved; decides between link and network
        """
        if _spans_hosts(self.config, self.role, ranks):
            return Work(network=count, messages=messages)
        return Work(link=count, messages=messages)

    def _offload_copies(self, trains: bool) -> Work:
        """Return the bytes copied between device and host in a phase for what the role offloads.

        trains: the phase updates the weights. Offloaded weights and optimizer state are then copied
        to the device and back; otherwise only the weights are copied, to the device.
        """
        found, copied = self.section.offload, 0.0
        if found.weights:
            copied += self.numbers * self.item * (2 if trains else 1)
        if found.optimizer and trains and isinstance(self.section, LearningConfig):
            shards = self.layout.dp if self.section.optimizer.use_distributed_optimizer else 1
            copied += 2 * self.numbers / shards * memory.optimizer_number_bytes(self.item)
        return Work(host=copied)

    def _micro_batches(self, samples: int) -> int:
        """Return the number of micro-batches that a rank makes of `samples`, at least 1."""
        return max(1, memory.micro_batches(self.section, samples, self.lengths.total))

    def _samples_at_once(self, samples: int) -> int:
        """Return the number of samples in a micro-batch, rounded up."""
        return -(-samples // self._micro_batches(samples))


def generation_work(config: RunConfig) -> Work:
    """Return the work of a generating rank in an iteration.

    Counts receiving weights, prefill, decoding, sampling, exchanges between tensor-parallel ranks
    (as if on one host) and expert-parallel ranks and, if the actor offloads its weights, copying
    them to the device.
    """
    actor, layout, lengths = config.actor_rollout, config.rollout_layout, mean_lengths(config)
    a, tp, item = actor.architecture, layout.tp, memory.itemsize(actor)
    samples = -(-config.samples_per_iteration // layout.dp)
    rows = min(cache_rows(config), samples)
    steps = max(lengths.response, -(-samples * lengths.response // rows))
    prompts, decoded = samples * lengths.prompt, samples * lengths.response
    passes = max(1, -(-prompts // generation_memory.PREFILL_TOKENS), -(-samples // rows))
    context = lengths.prompt + lengths.response / 2
    flop = layer_flop(a, prompts + decoded, tp)[0]
    flop += attention_flop(a, prompts, lengths.prompt / 2, tp)
    flop += attention_flop(a, decoded, context, tp)
    head = 2 * decoded * a.hidden_size * a.vocab_size / tp
    numbers = _numbers(a, Head.LANGUAGE_MODEL, tp, 0, 1, config.rollout_ep)
    kept = memory.layer_activation_bytes(a, prompts + decoded, tp, False, item)
    moved = 2 * kept * a.num_layers + (steps + passes) * numbers * item
    moved += steps * generation_memory.kv_cache_bytes(rows * int(context), a, tp, item)
    moved += 2 * generation_memory.sampling_bytes(decoded, a.vocab_size, actor.do_sample)
    calls = (steps + passes) * (a.num_layers + 1)
    sent = 2 * (prompts + decoded) * a.hidden_size * item * a.num_layers * _ring_factor(tp)
    messages = 2 * a.num_layers * (steps + passes) if tp > 1 else 0
    copied = numbers / config.layout(Role.ACTOR_ROLLOUT).pp * item if actor.offload.weights else 0
    work = Work(flop * a.num_layers + head, moved, calls, sent, 0.0, copied, messages)
    work += _exchange_work(config, item, prompts + decoded, steps + passes)
    return work + _weight_transfer_work(config, item)


def _exchange_work(config: RunConfig, item: int, tokens: int, passes: int) -> Work:
    """Return the work of exchanging tokens between rollout replicas that share experts.

    Tokens are gathered, and results are summed in fp32. No work if EP = 1.
    tokens: of a rank; passes: through the model
    """
    a, ep = config.actor_rollout.architecture, config.rollout_ep
    if ep == 1:
        return Work()
    sent = a.num_layers * (ep - 1) * tokens * a.hidden_size * (item + memory.FP32)
    messages = 3 * a.num_layers * passes  # tokens, their experts, results
    if _spans_hosts(config, Role.ACTOR_ROLLOUT, ep * config.rollout_tp):
        return Work(network=sent, messages=messages)
    return Work(link=sent, messages=messages)


def _weight_transfer_work(config: RunConfig, item: int) -> Work:
    """Return the work of receiving the weights that a generating rank does not train itself.

    item: bytes of a weight
    One message over the network if the actor's pool is on several hosts, else over the link. An
    empty Work if the rank trains all weights that it needs.
    """
    actor, layout = config.actor_rollout, config.layout(Role.ACTOR_ROLLOUT)
    a, tp = actor.architecture, layout.tp
    if config.parts:
        numbers = _numbers(a, Head.LANGUAGE_MODEL, config.rollout_tp, 0, 1, config.rollout_ep)
    else:
        place = (tp, 0, layout.pp, actor.model_chunks, actor.expert_model_parallel_size)
        numbers = received_numbers(a, Head.LANGUAGE_MODEL, *place)
    if not numbers:
        return Work()
    if len(config.resource_pool[config.pool_of(Role.ACTOR_ROLLOUT)]) > 1:
        return Work(network=numbers * item, messages=1)
    return Work(link=numbers * item, messages=1)
