"""The rollout model on the devices of the actor: same tensor and expert parallelism, no pipeline.

The rollout module shares the storage of the trained parameters. With several pipeline stages each
rank copies the other stages' parameters from the stream of Hugging Face tensors before generation,
and frees them afterwards. A rank generates with the same share of the experts that it trains; the
replicas that share experts keep in step (`rounds.py`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

import torch
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.engine.protocol import Part
from mindspeed_rlxf.models.parameters import StageParameter, stage_parameters
from mindspeed_rlxf.rollout.weights import build_rollout_module, load_hf_tensors


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
