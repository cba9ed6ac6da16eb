"""The rollout model on the devices of the actor: same tensor-parallel layout, no pipeline.

With one pipeline stage the rollout module shares the storage of the trained parameters. With
several, each rank receives the other stages' parameters before generation (broadcast from the rank
that trains them, one parameter at a time) and frees them afterwards. It receives the experts of
other expert-parallel ranks in the same way. Expert parallelism cannot be used in generation:
replicas take different numbers of steps, so ranks would wait for one another without end.
"""

from __future__ import annotations

import contextlib
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
        tp = engine.groups.tp.size()
        self.groups = ParallelGroups(tp, 1, seed)
        with self.groups.active():
            self.module = rollout_module(engine.role.architecture, tp, engine.dtype)
        named = dict(self.module.named_parameters())
        table = stage_parameters(engine.role.architecture, engine.head)
        self._by_source = {p.sources: named[p.name] for p in table}
        self._shapes = {k: p.shape for k, p in self._by_source.items()}
        self._held = contextlib.ExitStack()
        self.sleep()

    def active(self) -> contextlib.AbstractContextManager[None]:
        return self.groups.active()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        raise AssertionError("the weights are shared with training, which alone changes them")

    def wake(self) -> None:
        """Receive the parameters that other ranks train; a collective over pipeline and experts."""
        self._held.enter_context(self.engine.holding(Part.WEIGHTS))
        pipeline, experts, role = self.engine.groups.pp, self.engine.groups.ep, self.engine.role
        for stage in range(pipeline.size()):
            for ep_rank in range(experts.size()):
                place = (stage, pipeline.size(), role.model_chunks, ep_rank, experts.size())
                for parameter in rank_parameters(role.architecture, self.engine.head, *place):
                    target = self._by_source.get(parameter.sources)
                    if target is None or target.numel():
                        continue  # a tied output layer, or a parameter that every expert rank has
                    self._receive_one(target, parameter, stage, ep_rank)

    def _receive_one(
        self, target: torch.nn.Parameter, parameter: StageParameter, stage: int, ep_rank: int
    ) -> None:
        """Broadcast a parameter along the pipeline, then an expert to the other expert ranks."""
        pipeline, experts = self.engine.groups.pp, self.engine.groups.ep
        holds = parameter.expert is None or ep_rank == experts.rank()
        if holds and stage == pipeline.rank():
            target.data = self.engine.weights.tensors[parameter.name].data
        else:
            shape, where = self._shapes[parameter.sources], device.current_device()
            target.data = torch.empty(shape, dtype=self.engine.dtype, device=where)
        if holds and pipeline.size() > 1:
            dist.broadcast(target.data, dist.get_global_rank(pipeline, stage), group=pipeline)
        if parameter.expert is not None and experts.size() > 1:
            dist.broadcast(target.data, dist.get_global_rank(experts, ep_rank), group=experts)

    def sleep(self) -> None:
        # Megatron makes them on the host. They must be on the device, as the generating engine
        # reads the device of a sleeping module.
        where = device.current_device()
        for parameter in self._by_source.values():
            parameter.data = parameter.data.new_empty(0, device=where)
        self._held.close()
