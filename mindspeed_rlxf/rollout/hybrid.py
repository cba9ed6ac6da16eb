"""The rollout model on the devices of the actor: same tensor and expert parallelism, no pipeline.

With one pipeline stage the rollout module shares the storage of the trained parameters. With
several, each rank receives the other stages' parameters before generation (broadcast from the rank
that trains them, one parameter at a time) and frees them afterwards. A rank generates with the same
share of the experts that it trains; the replicas that share experts keep in step (`rounds.py`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.engine.protocol import Part
from mindspeed_rlxf.models.parameters import (
    StageParameter,
    rank_parameters,
    stage_parameters,
)
from mindspeed_rlxf.rollout.weights import build_rollout_module


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
        named = dict(self.module.named_parameters())
        share = {"ep_rank": experts.rank(), "ep": experts.size()}
        table = stage_parameters(architecture, engine.head, **share)
        self._by_source = {p.sources: named[p.name] for p in table}
        self._shapes = {k: p.shape for k, p in self._by_source.items()}
        self._kept_on_device = contextlib.ExitStack()
        self.sleep()

    def active(self) -> contextlib.AbstractContextManager[None]:
        return self.groups.active()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raise AssertionError: nothing but training changes these weights."""
        raise AssertionError("the weights are shared with training, which alone changes them")

    def wake(self) -> None:
        """Share this stage's weights and receive the other stages'; a collective of the pipeline.

        The trained weights are moved to the device, and stay there until `sleep`.
        """
        self._kept_on_device.enter_context(self.engine.holding(Part.WEIGHTS))
        pipeline, experts, role = self.engine.groups.pp, self.engine.groups.ep, self.engine.role
        for stage in range(pipeline.size()):
            place = (stage, pipeline.size(), role.model_chunks, experts.rank(), experts.size())
            stacks: dict[str, Tensor] = {}
            for parameter in rank_parameters(role.architecture, self.engine.head, *place):
                target = self._by_source.get(parameter.sources)
                if target is None or target.numel():
                    continue  # a tied output layer
                if stage == pipeline.rank():
                    target.data = self.engine.weights.tensors[parameter.name].data
                else:
                    target.data = self._allocate_parameter(parameter, stacks)
                if pipeline.size() > 1:
                    dist.broadcast(target.data, dist.get_global_rank(pipeline, stage), pipeline)

    def _allocate_parameter(self, parameter: StageParameter, stacks: dict[str, Tensor]) -> Tensor:
        """Allocate a parameter on the device, without setting it; experts of a layer in one tensor.

        Grouped products need the experts at equal distances in one memory.

        stacks: that tensor [experts, ...] by the parameter's name without the expert's index; gets
                an entry for the first expert of each layer
        """
        shape, where = self._shapes[parameter.sources], device.current_device()
        if parameter.expert is None:
            return torch.empty(shape, dtype=self.engine.dtype, device=where)
        count = (self.engine.role.architecture.num_experts or 0) // self.engine.groups.ep.size()
        layer = re.sub(r"local_experts\.\d+\.", "", parameter.name)
        if layer not in stacks:
            stacks[layer] = torch.empty((count, *shape), dtype=self.engine.dtype, device=where)
        return stacks[layer][parameter.expert % count]

    def sleep(self) -> None:
        """Detach all parameters, which become empty; frees the copies of other stages' weights.

        The trained weights may leave the device again.
        """
        # Megatron makes parameters on the host. Empty ones must be on the device, as the generating
        # engine reads the device of a sleeping module.
        where = device.current_device()
        for parameter in self._by_source.values():
            parameter.data = parameter.data.new_empty(0, device=where)
        self._kept_on_device.close()
