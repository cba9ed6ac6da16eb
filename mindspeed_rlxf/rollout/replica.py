"""Build this rank's part of a rollout replica, with the function that gives it new weights."""

import contextlib
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.device import megatron_versions, worlds
from mindspeed_rlxf.engine import offload
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.engine.train_engine import Part, TrainEngine
from mindspeed_rlxf.models.parameters import Head, StageParameter, hf_shapes, stage_parameters
from mindspeed_rlxf.rollout import transfer
from mindspeed_rlxf.rollout.native import NativeRollout
from mindspeed_rlxf.rollout.rollout_engine import ENGINES, NATIVE, RolloutEngine
from mindspeed_rlxf.rollout.weights import (
    OwnWeights,
    WeightSource,
    build_rollout_module,
    load_hf_tensors,
)


class SharedWeights:
    """Weights of all layers: shared with training, or while awake copied from other stages."""

    def __init__(self, engine: MegatronEngine, seed: int) -> None:
        """Build a module without weights, which sleeps; a collective over the world.

        engine: trains the weights in this process
        seed:   of Megatron's tensor-parallel random streams
        """
        self.engine = engine
        experts = engine.groups.ep
        self.groups = ParallelGroups(engine.groups.tp.size(), 1, seed, ep=experts.size())
        architecture = engine.role.architecture
        self.module, self.rounds = build_rollout_module(architecture, self.groups, engine.dtype)
        share = {"ep_rank": experts.rank(), "ep": experts.size()}
        self._table = list(stage_parameters(architecture, engine.head, **share))
        self._parameters = dict(self.module.named_parameters())
        self._shapes = {name: p.shape for name, p in self._parameters.items()}
        self._kept_on_device = contextlib.ExitStack()
        self.sleep()

    def active(self) -> contextlib.AbstractContextManager[None]:
        return self.groups.active()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Read no tensor: training changes the weights, and `wake` gets those of other stages."""

    def wake(self) -> None:
        """Share this stage's weights and copy the other stages' from the stream of the engine.

        With a pipeline a collective of the ranks of the role. The trained weights are moved to the
        device, and stay there until `sleep`.
        """
        self._kept_on_device.enter_context(self.engine.holding(Part.WEIGHTS))
        weights = self.engine.weights
        trained = {p.sources: p.name for p in weights.table if not p.is_tied_output_layer}
        copied, stacks = {}, dict[str, Tensor]()
        for parameter in self._table:
            target = self._parameters[parameter.name]
            if parameter.sources in trained:
                target.data = weights.tensors[trained[parameter.sources]].data
            else:
                target.data = copied[parameter.name] = self._allocate_parameter(parameter, stacks)
        if copied:
            stream = self.engine.hf_tensors()
            load_hf_tensors(copied, weights.architecture, self.groups, stream)

    def _allocate_parameter(self, parameter: StageParameter, stacks: dict[str, Tensor]) -> Tensor:
        """Allocate a parameter of 0 on the device; the experts of a layer in one tensor.

        Grouped products need the experts at equal distances in one memory.

        stacks: that tensor [experts, ...] by the parameter's name without the expert's index; gets
                an entry for the first expert of each layer
        """
        shape, where = self._shapes[parameter.name], device.current_device()
        if parameter.expert is None:
            return torch.zeros(shape, dtype=self.engine.dtype, device=where)
        count = (self.engine.role.architecture.num_experts or 0) // self.engine.groups.ep.size()
        layer = re.sub(r"local_experts\.\d+\.", "", parameter.name)
        if layer not in stacks:
            stacks[layer] = torch.zeros((count, *shape), dtype=self.engine.dtype, device=where)
        return stacks[layer][parameter.expert % count]

    def sleep(self) -> None:
        """Detach all parameters, which become empty; frees the copies of other stages' weights.

        The trained weights may leave the device again.
        """
        # Megatron makes parameters on the host. Empty ones must be on the device, as the generating
        # engine reads the device of a sleeping module.
        where = device.current_device()
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0, device=where)
        self._kept_on_device.close()


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
        nullcontext if name == NATIVE else offload.holding,
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
