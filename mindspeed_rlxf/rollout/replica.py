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

    take_weights: gives the engine the actor's weights; the argument is their number of updates. A
                  collective with the training ranks, if these are other ranks
    is_leader:    the results of this rank are used for the replica
    room:         frees memory on the device for an engine that has its own weights
    """

    engine: RolloutEngine
    take_weights: Callable[[int], None]
    is_leader: bool
    room: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def device_name(self) -> str:
        """The name that the device's library gives it; empty on a CPU."""
        return device.device_name()


def weight_sender(config: RunConfig, trained: TrainEngine) -> WeightSender | None:
    """Build the sender of this rank's weights; None if the generating ranks share them."""
    if config.parts is None:
        return None
    tensors = _megatron(trained).weights.tensors
    return WeightSender(tensors, plan_moves(config), worlds.whole_pool(), config.parts[0])


def build_replica(config: RunConfig, trained: TrainEngine | None) -> Replica:
    """Build the rollout engine of this rank; a collective over the ranks that generate.

    trained: the actor's engine in the same process, whose weights the rollout engine gets or
             shares; None = other ranks train and send their weights
    """
    if config.rollout.engine != NATIVE:
        assert trained is not None, "only the native engine generates on ranks of its own"
        return _build_plugin_replica(config, trained)
    if trained is not None:
        return _build_sharing_replica(config, _megatron(trained))
    return _build_receiving_replica(config)


def _build_plugin_replica(config: RunConfig, trained: TrainEngine) -> Replica:
    """Build an engine of a plugin, which gets every weight as a whole tensor."""
    engine = ENGINES[config.rollout.engine](config, trained)

    def take_weights(version: int) -> None:
        engine.update_weights(trained.hf_tensors(), version)

    is_leader = config.rollout_layout.is_leader(dist.get_rank())
    return Replica(engine, take_weights, is_leader, residency.holding)


def _build_sharing_replica(config: RunConfig, trained: MegatronEngine) -> Replica:
    """Build a replica on ranks that also train: it uses the trained weights."""
    shared = SharedWeights(trained, config.training.seed)
    engine = _native(config, shared)

    def take_weights(version: int) -> None:
        """Set the version; the weights are shared."""
        with engine.replacing_weights(version):
            pass

    return Replica(engine, take_weights, shared.groups.tp.rank() == 0)


def _build_receiving_replica(config: RunConfig) -> Replica:
    """Build a replica on ranks that only generate: it receives its weights."""
    assert config.parts is not None, "a rollout with weights of its own needs ranks of its own"
    megatron_versions.apply_patches()
    device.set_deterministic(config.training.deterministic)
    actor, tp = config.actor_rollout, config.rollout_layout.tp
    dtype = torch.bfloat16 if actor.bf16 else torch.float32
    own = OwnWeights(actor.architecture, tp, dtype, config.training.seed, config.rollout_ep)
    engine = _native(config, own)
    tensors = dict(own.module.named_parameters())
    receiver = WeightReceiver(tensors, plan_moves(config), worlds.whole_pool(), config.parts[0])

    def take_weights(version: int) -> None:
        """Receive the weights. Raises WeightsDiffer."""
        with engine.replacing_weights(version):
            receiver.receive()

    return Replica(engine, take_weights, own.groups.tp.rank() == 0)


def _megatron(engine: TrainEngine) -> MegatronEngine:
    assert isinstance(engine, MegatronEngine), "the native engine takes Megatron's weights alone"
    return engine


def _native(config: RunConfig, source: WeightSource) -> NativeRollout:
    memory_gib = config.device.memory_gib
    memory = int(memory_gib * 2**30) if memory_gib else None
    return NativeRollout(source, config.actor_rollout.num_samples_per_step, memory)
