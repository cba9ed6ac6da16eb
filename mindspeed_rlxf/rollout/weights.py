"""The Megatron module that generates, and the sources of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.models.grouped_experts import stack_experts
from mindspeed_rlxf.models.parameters import Head, hf_shapes, shard_slices, stage_parameters
from mindspeed_rlxf.models.shared_experts import Exchange, share_experts
from mindspeed_rlxf.models.transformer import TransformerModel, transformer_config
from mindspeed_rlxf.rollout.rounds import Rounds


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
        """Replace all weights, as `RolloutEngine.update_weights` says."""


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


ParallelRanks = tuple[int, int, int, int]
"""Tensor-parallel rank and size, expert-parallel rank and size."""


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
        parameters, tp, ep = dict(self.module.named_parameters()), self.groups.tp, self.groups.ep
        ranks = tp.rank(), tp.size(), ep.rank(), ep.size()
        load_hf_tensors(parameters, self.architecture, ranks, tensors)


@dataclass(frozen=True)
class _TensorSlice:
    """A slice of a Hugging Face tensor, and the rows or columns of a parameter that it fills."""

    target: Tensor  # the parameter
    dim: int
    start: int  # in the Hugging Face tensor
    offset: int  # in the target
    size: int

    def fill(self, tensor: Tensor) -> None:
        """Copy the slice of the Hugging Face tensor into the parameter."""
        piece = tensor.narrow(self.dim, self.start, self.size)
        self.target.narrow(self.dim, self.offset, self.size).copy_(piece)


@torch.no_grad()
def load_hf_tensors(
    parameters: dict[str, torch.nn.Parameter],
    architecture: ArchitectureConfig,
    ranks: ParallelRanks,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Copy a rank's slices of Hugging Face tensors into its parameters, one tensor at a time.

    parameters: of all layers, by their Megatron names
    tensors:    each with its Hugging Face name, whole, in any order, on any device
    Raises ValueError for a tensor that is missing, unknown or sent twice, or has another shape;
    some parameters are then overwritten.
    """
    slices = _map_slices(parameters, architecture, ranks)
    shapes = hf_shapes(architecture, Head.LANGUAGE_MODEL)
    missing = set(slices)
    for name, tensor in tensors:
        if name not in missing:
            reason = "was sent already" if name in slices else "is no tensor of this model"
            raise ValueError(f"{name} {reason}; send each tensor of the model once")
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"{name} must have the shape {shapes[name]}, not {tuple(tensor.shape)}; send the "
                "weights of the model that generates"
            )
        for each in slices[name]:
            each.fill(tensor)
        missing.remove(name)
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(slices)} tensors were not sent, {min(missing)} for one; send "
            "each tensor of the model once"
        )


def _map_slices(
    parameters: dict[str, torch.nn.Parameter],
    architecture: ArchitectureConfig,
    ranks: ParallelRanks,
) -> dict[str, list[_TensorSlice]]:
    """Map every Hugging Face name of the model to its slices that this rank needs, [] for none."""
    tp_rank, tp, ep_rank, ep = ranks
    found: dict[str, list[_TensorSlice]] = {
        name: [] for name in hf_shapes(architecture, Head.LANGUAGE_MODEL)
    }
    for parameter in stage_parameters(architecture, Head.LANGUAGE_MODEL, ep_rank=ep_rank, ep=ep):
        target, offset = parameters[parameter.name].data, 0
        for part in shard_slices(parameter, architecture, tp_rank, tp):
            found[part.source].append(_TensorSlice(target, part.dim, part.start, offset, part.size))
            offset += part.size
    return found
