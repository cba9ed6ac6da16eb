"""The Megatron module that generates, and the sources of its weights."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.models.grouped_experts import stack_experts
from mindspeed_rlxf.models.parameters import Head, hf_shapes, stage_parameters
from mindspeed_rlxf.models.shared_experts import Exchange, share_experts
from mindspeed_rlxf.models.transformer import TransformerModel, transformer_config
from mindspeed_rlxf.rollout.rounds import Rounds
from mindspeed_rlxf.weights.boxes import shard_boxes


class WeightSource(Protocol):
    """Gives the native engine its module, and brings or frees the module's weights."""

    @property
    def module(self) -> TransformerModel:
        """The module with all layers; its parameters may be empty until `wake`."""

    @property
    def rounds(self) -> Rounds:
        """Keeps the ranks that share the module's experts in step."""

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that activates the module's parallel groups for Megatron."""

    def wake(self) -> None:
        """Bring the weights into the module."""

    def sleep(self) -> None:
        """Free the memory that is not needed until `wake`."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights, as `RolloutEngine.update_weights` says.

        A source that shares the trained weights reads no tensor.
        """


def build_rollout_module(
    architecture: ArchitectureConfig, groups: ParallelGroups, dtype: torch.dtype
) -> tuple[TransformerModel, Rounds]:
    """Build a module without gradients, with all layers and this rank's experts, and its `Rounds`.

    The weights are not set. With expert parallelism the layers share their experts with the other
    ranks of the group.
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


class OwnWeights:
    """A module with weights of its own, which stay on the device; on ranks that only generate."""

    def __init__(
        self, architecture: ArchitectureConfig, tp: int, dtype: torch.dtype, seed: int, ep: int = 1
    ) -> None:
        """Build the module on the device with weights of 0; a collective over the world.

        seed: of Megatron's tensor-parallel random streams
        """
        self.architecture = architecture
        self.groups = ParallelGroups(tp, 1, seed, ep=ep)
        module, self.rounds = build_rollout_module(architecture, self.groups, dtype)
        self.module = module.to(device=device.current_device(), dtype=dtype)
        stack_experts(self.module)
        for parameter in self.module.parameters():
            parameter.data.zero_()  # the padding of the vocabulary is never sent

    def active(self) -> contextlib.AbstractContextManager[None]:
        return self.groups.active()

    def wake(self) -> None:
        """Do nothing: the weights stay on the device."""

    def sleep(self) -> None:
        """Do nothing: no training needs the memory."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's slices of the tensors into the parameters (see `load_hf_tensors`)."""
        parameters = dict(self.module.named_parameters())
        load_hf_tensors(parameters, self.architecture, self.groups, tensors)


@torch.no_grad()
def load_hf_tensors(
    parameters: Mapping[str, Tensor],
    architecture: ArchitectureConfig,
    groups: ParallelGroups,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Copy a rank's slices of Hugging Face tensors into its parameters, one tensor at a time.

    parameters: those to be set, by their Megatron names; without a pipeline
    tensors:    each with its Hugging Face name, whole, in any order, on any device
    Raises ValueError for a tensor that is missing, unknown or sent twice, or has another shape;
    some parameters are then overwritten.
    """
    tp, ep = groups.tp, groups.ep
    shapes = hf_shapes(architecture, Head.LANGUAGE_MODEL)
    # Hugging Face name -> views of the parameters, with the slices that fill them
    slices: dict[str, list[tuple[Tensor, tuple[slice, ...]]]] = {name: [] for name in shapes}
    for parameter in stage_parameters(
        architecture, Head.LANGUAGE_MODEL, ep_rank=ep.rank(), ep=ep.size()
    ):
        if parameter.name in parameters:
            for part in shard_boxes(parameter, architecture, tp.rank(), tp.size()):
                view = parameters[parameter.name][part.place.slices]
                slices[part.source].append((view, part.box.slices))
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
