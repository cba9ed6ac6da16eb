"""The generating Megatron module, and the sources for its weights."""

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.engine.train_engine import Part
from mindspeed_rlxf.models.grouped_experts import stack_experts
from mindspeed_rlxf.models.parameters import Head, StageParameter, hf_shapes, stage_parameters
from mindspeed_rlxf.models.shared_experts import Exchange, share_experts
from mindspeed_rlxf.models.transformer import TransformerModel, transformer_config
from mindspeed_rlxf.rollout.rounds import Rounds
from mindspeed_rlxf.weights.chunks import shard_chunks


def build_rollout_module(
    architecture: ArchitectureConfig, groups: ParallelGroups, dtype: torch.dtype
) -> tuple[TransformerModel, Rounds]:
    """Build a module without gradients, with all layers and this rank's experts, and its `Rounds`.

    The weights are not set. With expert parallelism the layers share their experts across the
    group.
    """
    tp, ep = groups.tp.size(), groups.ep.size()
    config = transformer_config(architecture, tp, 1, False, dtype)
    # Set afterwards, because megatron-core 0.12 refuses TP and EP without sequence parallelism.
    config.expert_model_parallel_size = ep
    with groups.active():
        module = TransformerModel(config, architecture, Head.LANGUAGE_MODEL, True, True)
    exchange = Exchange(groups.ep, groups.tp)
    layers = share_experts(module, exchange) if ep > 1 else []
    return module.requires_grad_(False), Rounds(layers, exchange, groups.ep_host)


class SharedWeights:
    """Weights for all layers: shared with training, or copied while awake.

    Copies are those of other stages, and weights with adapters merged into them.
    """

    def __init__(self, engine: MegatronEngine, seed: int) -> None:
        """Build a sleeping module without weights; a collective over the world.

        `engine` trains the weights in this process; `seed` starts Megatron's tensor-parallel random
        streams.
        """
        self.engine = engine
        experts = engine.groups.ep
        self.groups = ParallelGroups(engine.groups.tp.size(), 1, seed, ep=experts.size())
        architecture = engine.role.architecture
        self.module, self.rounds = build_rollout_module(architecture, self.groups, engine.dtype)
        self._table = list(
            stage_parameters(architecture, engine.head, ep_rank=experts.rank(), ep=experts.size())
        )
        self._parameters = dict(self.module.named_parameters())
        self._shapes = {name: p.shape for name, p in self._parameters.items()}
        self._kept_on_device = contextlib.ExitStack()
        self.sleep()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Read no tensor: training changes the weights, and `wake` copies what is not shared."""

    def wake(self) -> None:
        """Share this stage's weights and copy other stages' and adapted ones from the stream.

        With a pipeline or adapters this is a collective over the role's ranks. The trained weights
        stay on the device until `sleep`.
        """
        self._kept_on_device.enter_context(self.engine.holding(Part.WEIGHTS))
        weights = self.engine.weights
        shared = (p for p in weights.table if not weights.is_adapted(p))
        trained = {p.sources: p.name for p in shared if not p.is_tied_output_layer}
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
        """Allocate a zero parameter on the device; a layer's experts in one tensor in `stacks`.

        Grouped GEMMs need the experts at equal distances in one memory.
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
        """Detach all parameters, which become empty; frees the copies.

        The trained weights may leave the device again.
        """
        # Megatron makes parameters on the host. Empty ones must be on the device, as the generating
        # engine reads the device of a sleeping module.
        where = device.current_device()
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0, device=where)
        self._kept_on_device.close()


class OwnWeights:
    """A module with its own weights, which stay on the device; for ranks that only generate."""

    def __init__(
        self, architecture: ArchitectureConfig, tp: int, dtype: torch.dtype, seed: int, ep: int = 1
    ) -> None:
        """Build the module on the device with zero weights; a collective over the world."""
        self.architecture = architecture
        self.groups = ParallelGroups(tp, 1, seed, ep=ep)
        module, self.rounds = build_rollout_module(architecture, self.groups, dtype)
        self.module = module.to(device=device.current_device(), dtype=dtype)
        stack_experts(self.module)
        for parameter in self.module.parameters():
            parameter.data.zero_()  # the padding of the vocabulary is never sent

    def wake(self) -> None:
        """Do nothing: the weights stay on the device."""

    def sleep(self) -> None:
        """Do nothing: no training needs the memory."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's slices into the parameters (see `load_hf_tensors`)."""
        parameters = dict(self.module.named_parameters())
        load_hf_tensors(parameters, self.architecture, self.groups, tensors)


WeightSource: TypeAlias = SharedWeights | OwnWeights
"""Gives the native engine its module, and brings or frees the module's weights."""


@torch.no_grad()
def load_hf_tensors(
    parameters: Mapping[str, Tensor],
    architecture: ArchitectureConfig,
    groups: ParallelGroups,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Copy a rank's slices from Hugging Face tensors into its parameters, one tensor at a time.

    Args:
        parameters: Parameters to set, by Megatron name; without a pipeline.
        architecture: The model.
        groups: This rank's tensor and expert groups.
        tensors: Each complete, with its Hugging Face name, in any order, on any device.

    Raises:
        ValueError: A tensor is missing, unknown or sent twice, or has another shape; some
            parameters are then overwritten.
    """
    tp, ep = groups.tp, groups.ep
    shapes = hf_shapes(architecture, Head.LANGUAGE_MODEL)
    # Hugging Face name -> views of the parameters, with the slices that fill them
    slices: dict[str, list[tuple[Tensor, tuple[slice, ...]]]] = {name: [] for name in shapes}
    for parameter in stage_parameters(
        architecture, Head.LANGUAGE_MODEL, ep_rank=ep.rank(), ep=ep.size()
    ):
        if parameter.name in parameters:
            for part in shard_chunks(parameter, architecture, tp.rank(), tp.size()):
                view = parameters[parameter.name][part.place.slices]
                slices[part.source].append((view, part.chunk.slices))
    missing = set(shapes)
    for name, tensor in tensors:
        if name not in missing:
            reason = "was sent already" if name in shapes else "is no tensor of this model"
            raise ValueError(f"{name} {reason}; send each tensor of the model once")
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"{name} must have the shape {shapes[name]}, not {tuple(tensor.shape)}; send the "
                "weights of the model that generates"
            )
        for view, filling in slices[name]:
            view.copy_(tensor[filling])
        missing.remove(name)
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(shapes)} tensors were not sent, {min(missing)} for one; send "
            "each tensor of the model once"
        )
