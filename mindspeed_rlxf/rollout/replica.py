"""Build this rank's part of a rollout replica, with the function that gives it new weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.device import megatron_versions, worlds
from mindspeed_rlxf.engine import residency
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.protocol import TrainEngine
from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.rollout import transfer
from mindspeed_rlxf.rollout.engines import ENGINES, NATIVE
from mindspeed_rlxf.rollout.hybrid import SharedWeights
from mindspeed_rlxf.rollout.native import NativeRollout
from mindspeed_rlxf.rollout.protocol import RolloutEngine
from mindspeed_rlxf.rollout.weights import OwnWeights, WeightSource


@dataclass(frozen=True)
class Replica:
    """This rank's part of a rollout replica.

    take_weights: gives the engine the actor's weights; its argument is the number of updates that
                  they contain. Where other ranks train, it is a collective with them
    is_leader:    whether the results of this rank are used for the replica
    make_room:    returns a context manager in which the training engines leave the device, for an
                  engine that has its own weights; by default it does nothing
    """

    engine: RolloutEngine
    take_weights: Callable[[int], None]
    is_leader: bool
    make_room: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def device_name(self) -> str:
        """The device's name as its library reports it; empty on a CPU."""
        return device.device_name()


def send_weights(config: RunConfig, trained: TrainEngine) -> None:
    """Send the trained weights to the ranks that only generate.

    A collective: all ranks that train call it while the others call `Replica.take_weights`.
    """
    transfer.send(trained.hf_tensors(), _make_buckets(config), worlds.weights_group())


def build_replica(config: RunConfig, trained: TrainEngine | None) -> Replica:
    """Build this rank's rollout engine, without weights; a collective of the ranks that generate.

    trained: the actor's engine in the same process, whose weights the rollout engine will get or
             share; None = other ranks train and send their weights. Then it also patches Megatron
             and sets torch's determinism in this process, which no engine of training has done
    Raises AssertionError for None with another engine than the package's own.
    """
    leads, name = config.rollout_layout.is_leader(dist.get_rank()), config.rollout.engine
    if trained is None:
        assert name == NATIVE, "only the native engine generates on ranks of its own"
        return _build_receiving_replica(config, leads)
    engine: RolloutEngine
    if name == NATIVE:
        assert isinstance(trained, MegatronEngine), "the native engine shares Megatron's weights"
        engine = _build_native_engine(config, SharedWeights(trained, config.training.seed))
    else:
        engine = ENGINES[name](config, trained)
    return Replica(
        engine,
        lambda version: engine.update_weights(trained.hf_tensors(), version),
        leads,
        nullcontext if name == NATIVE else residency.holding,
    )


def _build_receiving_replica(config: RunConfig, leads: bool) -> Replica:
    """Build a replica on ranks that only generate, which receives its weights."""
    megatron_versions.apply_patches()
    device.set_deterministic(config.training.deterministic)
    actor, tp, dtype = config.actor_rollout, config.rollout_tp, _dtype(config)
    own = OwnWeights(actor.architecture, tp, dtype, config.training.seed, config.rollout_ep)
    engine = _build_native_engine(config, own)
    buckets, group = _make_buckets(config), worlds.weights_group()
    assert group is not None, "a rollout with weights of its own needs ranks of its own"
    return Replica(
        engine,
        lambda version: engine.update_weights(transfer.receive(buckets, dtype, group), version),
        leads,
    )


def _dtype(config: RunConfig) -> torch.dtype:
    return torch.bfloat16 if config.actor_rollout.bf16 else torch.float32


def _make_buckets(config: RunConfig) -> list[transfer.Bucket]:
    """Return the buckets of the actor's weights, the same on every rank."""
    shapes = hf_shapes(config.actor_rollout.architecture, Head.LANGUAGE_MODEL)
    return transfer.make_buckets(shapes, _dtype(config).itemsize)


def _build_native_engine(config: RunConfig, source: WeightSource) -> NativeRollout:
    memory_gib = config.device.memory_gib
    memory = int(memory_gib * 2**30) if memory_gib else None
    return NativeRollout(source, config.actor_rollout.num_samples_per_step, memory)
