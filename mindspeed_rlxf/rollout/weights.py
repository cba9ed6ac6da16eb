"""The generating Megatron module, and the sources for its weights."""

import contextlib
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.lora import LoraConfig
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.engine.train_engine import MemoryKind
from mindspeed_rlxf.models.adapter_parameters import adapter_parameters, adapter_shapes
from mindspeed_rlxf.models.adapters import attach_adapters
from mindspeed_rlxf.models.grouped_experts import stack_experts
from mindspeed_rlxf.models.heads import fp32_linear
from mindspeed_rlxf.models.parameters import Head, StageParameter, hf_shapes, stage_parameters
from mindspeed_rlxf.models.shared_experts import Exchange, share_experts
from mindspeed_rlxf.models.transformer import TransformerModel, transformer_config
from mindspeed_rlxf.rollout.expert_sync import ExpertSync
from mindspeed_rlxf.weights.chunks import shard_chunks


def build_rollout_module(
    architecture: ArchitectureConfig,
    groups: ParallelGroups,
    dtype: torch.dtype,
    lora: LoraConfig,
    fp32_head: bool,
) -> tuple[TransformerModel, ExpertSync]:
    """Build a module without gradients, with all layers and this rank's experts, and its sync.

    Its linears have the adapters of `lora`, which compute beside the weights. Neither are set. With
    expert parallelism the layers share their experts across the group.
    """
    tp, ep = groups.tp.size(), groups.ep.size()
    config = transformer_config(architecture, tp, 1, False, dtype)
    # Set afterwards, because megatron-core 0.12 refuses TP and EP without sequence parallelism.
    config.expert_model_parallel_size = ep
    with groups.active():
        module = TransformerModel(config, architecture, Head.LANGUAGE_MODEL, True, True)
    if fp32_head:
        module.linear = fp32_linear
    if lora.rank:
        table = stage_parameters(architecture, Head.LANGUAGE_MODEL)
        attach_adapters(module, table, architecture, tp, lora)
    exchange = Exchange(groups.ep, groups.tp)
    layers = share_experts(module, exchange) if ep > 1 else []
    return module.requires_grad_(False), ExpertSync(layers, exchange, groups.ep_host)


def rollout_parameters(
    architecture: ArchitectureConfig, lora: LoraConfig, ep_rank: int, ep: int
) -> list[StageParameter]:
    """Return the parameters of a rollout module: the model's, then those of its adapters."""
    table = list(stage_parameters(architecture, Head.LANGUAGE_MODEL, ep_rank=ep_rank, ep=ep))
    return table + list(adapter_parameters(table, architecture, lora))


class SharedWeights:
    """Weights for all layers, adapters included: shared with training, or copied while awake.

    Copies are those of other stages.
    """

    def __init__(self, engine: MegatronEngine, seed: int) -> None:
        """Build a sleeping module without weights; a collective over the world.

        `engine` trains the weights in this process; `seed` starts Megatron's tensor-parallel random
        streams.
        """
        self.engine = engine
        experts = engine.groups.ep
        self.groups = ParallelGroups(engine.groups.tp.size(), 1, seed, ep=experts.size())
        architecture, lora = engine.role.architecture, engine.lora
        self.module, self.expert_sync = build_rollout_module(
            architecture, self.groups, engine.dtype, lora, engine.role.has_fp32_logits
        )
        self._table = rollout_parameters(architecture, lora, experts.rank(), experts.size())
        self._parameters = dict(self.module.named_parameters())
        self._shapes = {name: p.shape for name, p in self._parameters.items()}
        self._kept_on_device = contextlib.ExitStack()
        self.sleep()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Read no tensor: training changes the weights, and `wake` copies what is not shared."""

    def wake(self) -> None:
        """Share this stage's weights and copy other stages' from the stream.

        With a pipeline this is a collective over the role's ranks. The trained weights stay on the
        device until `sleep`.
        """
        self._kept_on_device.enter_context(self.engine.holding(MemoryKind.WEIGHTS))
        weights = self.engine.weights
        shared = (*weights.table, *weights.adapters)
        trained = {p.sources: p.name for p in shared if not p.is_tied_output_layer}
        copied, stacks = {}, dict[str, Tensor]()
        for parameter in self._table:
            target = self._parameters[parameter.name]
            if parameter.sources in trained:
                target.data = weights.tensors[trained[parameter.sources]].data
            else:
                target.data = copied[parameter.name] = self._allocate_parameter(parameter, stacks)
        if copied:
            stream = chain(self.engine.hf_tensors(), self.engine.adapter_tensors())
            load_hf_tensors(copied, weights.architecture, self.groups, stream, weights.lora)

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
        self,
        architecture: ArchitectureConfig,
        tp: int,
        dtype: torch.dtype,
        seed: int,
        ep: int = 1,
        lora: LoraConfig | None = None,
        fp32_head: bool = False,
    ) -> None:
        """Build the module on the device with zero weights; a collective over the world.

        `lora` describes the adapters that are sent, if any.
        """
        self.architecture, self.lora = architecture, lora or LoraConfig()
        self.has_base = False  # whether a whole model was sent
        self.groups = ParallelGroups(tp, 1, seed, ep=ep)
        module, self.expert_sync = build_rollout_module(
            architecture, self.groups, dtype, self.lora, fp32_head
        )
        self.module = module.to(device=device.current_device(), dtype=dtype)
        stack_experts(self.module)
        for parameter in self.module.parameters():
            parameter.data.zero_()  # the padding of the vocabulary is never sent

    def wake(self) -> None:
        """Do nothing: the weights stay on the device."""

    def sleep(self) -> None:
        """Do nothing: no training needs the memory."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's slices into the parameters (see `load_hf_tensors`).

        After the first time the adapters alone may be sent.
        """
        parameters = dict(self.module.named_parameters())
        load_hf_tensors(
            parameters, self.architecture, self.groups, tensors, self.lora, self.has_base
        )
        self.has_base = True


WeightSource: TypeAlias = SharedWeights | OwnWeights
"""Gives the native engine its module, and brings or frees the module's weights."""


@torch.no_grad()
def load_hf_tensors(
    parameters: Mapping[str, Tensor],
    architecture: ArchitectureConfig,
    groups: ParallelGroups,
    tensors: Iterable[tuple[str, Tensor]],
    lora: LoraConfig | None = None,
    has_base: bool = False,
) -> None:
    """Copy a rank's slices from Hugging Face tensors into its parameters, one tensor at a time.

    Args:
        parameters: Parameters to set, by Megatron name; without a pipeline.
        architecture: The model.
        groups: This rank's tensor and expert groups.
        tensors: Each complete, with its Hugging Face name, in any order, on any device.
        lora: The model's adapters, whose tensors are sent too; None = it has none.
        has_base: Whether the parameters have the weights already, so that adapters may come alone.

    Raises:
        ValueError: A tensor is missing, unknown or sent twice, or has another shape; some
            parameters are then overwritten.
    """
    tp, ep, lora = groups.tp, groups.ep, lora or LoraConfig()
    base = hf_shapes(architecture, Head.LANGUAGE_MODEL)
    shapes = base | adapter_shapes(architecture, Head.LANGUAGE_MODEL, lora)
    # Hugging Face name -> views of the parameters, with the slices that fill them
    slices: dict[str, list[tuple[Tensor, tuple[slice, ...]]]] = {name: [] for name in shapes}
    for parameter in rollout_parameters(architecture, lora, ep.rank(), ep.size()):
        if parameter.name in parameters:
            for shard_chunk in shard_chunks(parameter, architecture, tp.rank(), tp.size()):
                view = parameters[parameter.name][shard_chunk.place.slices]
                slices[shard_chunk.source].append((view, shard_chunk.chunk.slices))
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
    adapters_alone = lora.rank > 0 and has_base and missing == base.keys()
    if missing and not adapters_alone:
        raise ValueError(
            f"{len(missing)} of {len(shapes)} tensors were not sent, {min(missing)} for one; send "
            "each tensor of the model once"
        )
