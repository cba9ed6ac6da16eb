"""The rollout model on the devices of the actor: same tensor and expert parallelism, no pipeline.

With one pipeline stage the rollout module shares the storage of the trained parameters. With
several, each rank receives the other stages' parameters before generation (broadcast from the rank
that trains them, one parameter at a time) and frees them afterwards. Of the experts a rank has its
own share in training and in generation, where the replicas that share them generate in rounds
(`rounds.py`).
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
from mindspeed_rlxf.rollout.weights import rollout_module


class SharedWeights:
    """All layers of the trained model. While awake it has copies of what other ranks train."""

    def __init__(self, engine: MegatronEngine, seed: int) -> None:
        """A collective over the world."""
        self.engine = engine
        experts = engine.groups.ep
        self.groups = ParallelGroups(engine.groups.tp.size(), 1, seed, ep=experts.size())
        architecture = engine.role.architecture
        self.module, self.rounds = rollout_module(architecture, self.groups, engine.dtype)
        named = dict(self.module.named_parameters())
        share = {"ep_rank": experts.rank(), "ep": experts.size()}
        table = stage_parameters(architecture, engine.head, **share)
        self._by_source = {p.sources: named[p.name] for p in table}
        self._shapes = {k: p.shape for k, p in self._by_source.items()}
        self._held = contextlib.ExitStack()
        self.sleep()

    def active(self) -> contextlib.AbstractContextManager[None]:
        return self.groups.active()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        raise AssertionError("the weights are shared with training, which alone changes them")

    def wake(self) -> None:
        """Receive the parameters of other stages; a collective over the pipeline."""
        self._held.enter_context(self.engine.holding(Part.WEIGHTS))
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
                    target.data = self._empty(parameter, stacks)
                if pipeline.size() > 1:
                    dist.broadcast(target.data, dist.get_global_rank(pipeline, stage), pipeline)

    def _empty(self, parameter: StageParameter, stacks: dict[str, Tensor]) -> Tensor:
        """Allocate a parameter; experts of a layer lie one after the other, for grouped products.

        stacks: memory for all experts of a layer, by their names without the expert; is added to
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
        # Megatron makes them on the host. They must be on the device, as the generating engine
        # reads the device of a sleeping module.
        where = device.current_device()
        for parameter in self._by_source.values():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=where)
        self._held.close()
