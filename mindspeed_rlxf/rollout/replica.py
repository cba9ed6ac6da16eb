"""Build this rank's part in a rollout replica, and the function that gives it new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.generation_memory import Capacities
from mindspeed_rlxf.config.schema import ActorConfig, RunConfig
from mindspeed_rlxf.device import worlds
from mindspeed_rlxf.engine import offload
from mindspeed_rlxf.engine.train_engine import TrainEngine
from mindspeed_rlxf.models.adapter_parameters import adapter_shapes
from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.rollout import transfer
from mindspeed_rlxf.rollout.agreement import Agreement
from mindspeed_rlxf.rollout.rollout_engine import (
    ENGINES,
    NATIVE,
    TRANSFORMERS,
    VLLM,
    RolloutEngine,
    StepwiseEngine,
)
from mindspeed_rlxf.rollout.whole_responses import WholeResponses

if TYPE_CHECKING:
    from mindspeed_rlxf.rollout.hf_rollout import TransformersRollout
    from mindspeed_rlxf.rollout.native import NativeRollout

Stream: TypeAlias = Callable[[bool], Iterable[tuple[str, Tensor]]]
"""(whether with the base of the adapters) -> tensors with their Hugging Face names."""


@dataclass(frozen=True)
class Replica:
    """This rank's part in a rollout replica.

    Attributes:
        engine: The rollout engine; one that only generates whole responses in an adapter.
        take_weights: Gives the engine the actor's weights; its arguments are their number of
            updates, and whether they come with the base of the adapters, which else is there
            already. If other ranks train, this is a collective with them.
        is_leader: Whether this rank's results are used for the replica.
        make_room: Returns a context manager in which the training engines leave the device, for an
            engine with its own weights; by default it does nothing.
        take_receipts: Returns the receipts of syncs since the last call; [] for engines in process.
        server_has_failed: Whether the engine's server has, on leaders, and new weights start one.
        agreement: With the other ranks, in runs with agents.
    """

    engine: StepwiseEngine
    take_weights: Callable[[int, bool], None]
    is_leader: bool
    make_room: Callable[[], AbstractContextManager[None]] = nullcontext
    take_receipts: Callable[[], list[Any]] = list
    server_has_failed: Callable[[], bool] = bool
    agreement: Agreement = field(default_factory=Agreement)


def sent_tensors(trained: TrainEngine, with_base: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield what generation gets: the weights if `with_base`, then the adapters, if any."""
    if with_base:
        yield from trained.hf_tensors()
    yield from trained.adapter_tensors()


def send_weights(config: RunConfig, trained: TrainEngine, with_base: bool) -> None:
    """Send the trained weights to the ranks that only generate; adapters alone if not `with_base`.

    A collective: all training ranks call it while the others call `Replica.take_weights`.
    """
    buckets = _make_buckets(config, with_base)
    transfer.send(sent_tensors(trained, with_base), buckets, worlds.weights_group())


def build_replica(config: RunConfig, trained: TrainEngine | None, folder: str = "") -> Replica:
    """Build this rank's part of a replica (`_build_engine`), and the groups that agents need."""
    replica = _build_engine(config, trained, folder)
    if not config.rollout.runs_agents:
        return replica
    agreement = Agreement(config.rollout_tp, shares_experts=config.rollout_ep > 1)
    return replace(replica, agreement=agreement)


def _build_engine(config: RunConfig, trained: TrainEngine | None, folder: str) -> Replica:
    """Build this rank's rollout engine, without weights; a collective over the generating ranks.

    Args:
        config: The run.
        trained: The actor's engine in the same process, whose weights the rollout engine gets or
            shares. None = other ranks train and send their weights; then this also patches Megatron
            and sets torch's determinism, as no training engine has done so.
        folder: For logs of servers.

    Raises:
        AssertionError: `trained` is None and the engine is neither native nor vLLM's.
    """
    leads, name = config.rollout_layout.is_leader(dist.get_rank()), config.rollout.engine
    seed, actor = config.training.seed, config.actor_rollout
    if name == VLLM:
        return _build_vllm(config, trained, folder)
    if trained is not None and name != NATIVE:
        if name == TRANSFORMERS:
            from mindspeed_rlxf.rollout.hf_rollout import TransformersRollout  # imports for seconds

            engine: RolloutEngine = TransformersRollout(actor)
        else:
            engine = ENGINES[name](config, trained)
        return Replica(
            in_slices(engine),
            lambda version, base: engine.update_weights(sent_tensors(trained, base), version),
            leads,
            offload.holding,
        )
    assert name == NATIVE, "only the native engine generates on ranks of its own"
    # They bring in Megatron, which processes of other engines must not import.
    from mindspeed_rlxf.device import megatron_versions
    from mindspeed_rlxf.engine.engine import MegatronEngine
    from mindspeed_rlxf.rollout.native import NativeRollout
    from mindspeed_rlxf.rollout.weights import OwnWeights, SharedWeights, WeightSource

    if trained is not None:
        assert isinstance(trained, MegatronEngine), "the native engine shares Megatron's weights"
        source: WeightSource = SharedWeights(trained, seed)
        stream: Stream = partial(sent_tensors, trained)
    else:
        megatron_versions.apply_patches()
        device.set_deterministic(config.training.deterministic)
        dtype = torch.bfloat16 if actor.bf16 else torch.float32
        group = worlds.weights_group()
        assert group is not None, "a rollout with weights of its own needs ranks of its own"
        sizes = config.rollout_tp, dtype, seed, config.rollout_ep
        source = OwnWeights(actor.architecture, *sizes, actor.lora, actor.has_fp32_logits)
        stream = partial(_receive, config, dtype, group)
    memory_gib = config.device.memory_gib
    memory = int(memory_gib * 2**30) if memory_gib else None
    native = NativeRollout(
        source,
        actor.num_samples_per_step,
        memory,
        capacities=find_capacities(config),
        first_rank_draws=config.rollout.first_rank_draws,
        decode_graphs=config.makes_decode_graphs,
    )
    return Replica(
        native, lambda version, base: native.update_weights(stream(base), version), leads
    )


def in_slices(engine: RolloutEngine) -> StepwiseEngine:
    """Return an engine that can `advance`: itself, or an adapter to whole responses."""
    if hasattr(engine, "advance"):
        slicing: Any = engine
        return slicing
    return WholeResponses(engine)


def find_capacities(config: RunConfig) -> Capacities | None:
    """Return the sizes of a replica's generation, where requests enter while others are there.

    A replica that has more than its part of the samples under way lets some wait.
    """
    staleness, actor = config.rollout.max_staleness, config.actor_rollout
    if not config.rollout.runs_slices:
        return None
    num_batches = staleness - config.lead + 1
    num_prompts = num_batches * config.training.global_batch_size
    samples = -(-num_prompts // config.rollout_layout.dp) * actor.n_samples_per_prompt
    return Capacities(actor.max_prompt_length, actor.max_new_tokens, samples)


def build_native_alone(actor: ActorConfig, seed: int) -> NativeRollout:
    """Build the native engine in a world of one process, where nothing trains, without weights."""
    from mindspeed_rlxf.device import megatron_versions
    from mindspeed_rlxf.rollout.native import NativeRollout
    from mindspeed_rlxf.rollout.weights import OwnWeights

    megatron_versions.apply_patches()
    dtype = torch.bfloat16 if actor.bf16 else torch.float32
    weights = OwnWeights(
        actor.architecture, 1, dtype, seed, lora=actor.lora, fp32_head=actor.has_fp32_logits
    )
    return NativeRollout(weights, actor.num_samples_per_step)


def build_transformers_alone(actor: ActorConfig) -> TransformersRollout:
    """Build the engine of transformers as `build_native_alone` builds the native one."""
    from mindspeed_rlxf.rollout.hf_rollout import TransformersRollout

    return TransformersRollout(actor)


def _build_vllm(config: RunConfig, trained: TrainEngine | None, folder: str) -> Replica:
    from mindspeed_rlxf.rollout.vllm.engine import VllmRollout

    actor = config.actor_rollout
    engine = VllmRollout(config, folder, offload.room_for_other_processes)
    if trained is not None:
        stream: Stream = partial(sent_tensors, trained)
    else:
        group = worlds.weights_group()
        assert group is not None, "a rollout with weights of its own needs ranks of its own"
        dtype = torch.bfloat16 if actor.bf16 else torch.float32
        stream = partial(_receive, config, dtype, group)
    return Replica(
        engine,
        lambda version, base: engine.update_weights(stream(base), version),
        engine.is_leader,
        offload.room_for_other_processes,
        engine.take_receipts,
        lambda: engine.has_failed,
    )


def _receive(
    config: RunConfig, dtype: torch.dtype, group: dist.ProcessGroup, with_base: bool
) -> Iterator[tuple[str, Tensor]]:
    return transfer.receive(_make_buckets(config, with_base), dtype, group)


def _make_buckets(config: RunConfig, with_base: bool) -> list[transfer.Bucket]:
    actor, head = config.actor_rollout, Head.LANGUAGE_MODEL
    shapes = hf_shapes(actor.architecture, head) if with_base else {}
    shapes |= adapter_shapes(actor.architecture, head, actor.lora)
    return transfer.make_buckets(shapes, 2 if actor.bf16 else 4)
