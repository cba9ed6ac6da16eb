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
from mindspeed_rlxf.rollout.engines import ENGINES, NATIVE
from mindspeed_rlxf.rollout.hybrid import SharedWeights
from mindspeed_rlxf.rollout.native import NativeRollout
from mindspeed_rlxf.rollout.protocol import RolloutEngine
from mindspeed_rlxf.rollout.transfer import WeightReceiver, WeightSender
from mindspeed_rlxf.rollout.transfer_plan import plan_moves
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


def weight_sender(config: RunConfig, trained: TrainEngine) -> WeightSender | None:
    """Build the sender of this rank's weights; None if the same ranks train and generate."""
    if config.parts is None:
        return None
    tensors = _as_megatron_engine(trained).weights.tensors
    return WeightSender(tensors, plan_moves(config), worlds.whole_pool(), config.parts[0])


def build_replica(config: RunConfig, trained: TrainEngine | None) -> Replica:
    """Build this rank's rollout engine, without weights; a collective of the ranks that generate.

    trained: the actor's engine in the same process, whose weights the rollout engine will get or
             share; None = other ranks train and send their weights. Then it also patches Megatron
             and sets torch's determinism in this process, which no engine of training has done
    Raises AssertionError for None with another engine than the package's own.
    """
    if config.rollout.engine != NATIVE:
        assert trained is not None, "only the native engine generates on ranks of its own"
        engine = ENGINES[config.rollout.engine](config, trained)
        return Replica(
            engine,
            lambda version: engine.update_weights(trained.hf_tensors(), version),
            config.rollout_layout.is_leader(dist.get_rank()),
            residency.holding,
        )
    if trained is not None:
        return _build_sharing_replica(config, _as_megatron_engine(trained))
    return _build_receiving_replica(config)


def _build_sharing_replica(config: RunConfig, trained: MegatronEngine) -> Replica:
    shared = SharedWeights(trained, config.training.seed)
    engine = _build_native_engine(config, shared)

    def take_weights(version: int) -> None:
        """Set the version only, as the weights are shared."""
        with engine.replacing_weights(version):
            pass

    return Replica(engine, take_weights, shared.groups.tp.rank() == 0)


def _build_receiving_replica(config: RunConfig) -> Replica:
    """Build a replica on ranks that only generate, which receives its weights.

    Also patches Megatron and sets torch's determinism in this process, in which no actor does.
    """
    assert config.parts is not None, "a rollout with weights of its own needs ranks of its own"
    megatron_versions.apply_patches()
    device.set_deterministic(config.training.deterministic)
    actor, tp = config.actor_rollout, config.rollout_layout.tp
    dtype = torch.bfloat16 if actor.bf16 else torch.float32
    own = OwnWeights(actor.architecture, tp, dtype, config.training.seed, config.rollout_ep)
    engine = _build_native_engine(config, own)
    tensors = dict(own.module.named_parameters())
    receiver = WeightReceiver(tensors, plan_moves(config), worlds.whole_pool(), config.parts[0])

    def take_weights(version: int) -> None:
        """Receive the weights. Raises WeightsDiffer if they arrive changed."""
        with engine.replacing_weights(version):
            receiver.receive()

    return Replica(engine, take_weights, own.groups.tp.rank() == 0)


def _as_megatron_engine(engine: TrainEngine) -> MegatronEngine:
    assert isinstance(engine, MegatronEngine), "the native engine takes Megatron's weights alone"
    return engine


def _build_native_engine(config: RunConfig, source: WeightSource) -> NativeRollout:
    memory_gib = config.device.memory_gib
    memory = int(memory_gib * 2**30) if memory_gib else None
    return NativeRollout(source, config.actor_rollout.num_samples_per_step, memory)
