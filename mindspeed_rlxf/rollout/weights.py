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
    def module(self) -> TransformerModel: ...

    @property
    def rounds(self) -> Rounds:
        """The rounds in which the module's ranks exchange tokens for experts."""

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Activate the module's parallel groups for Megatron inside the block."""

    def wake(self) -> None:
        """Bring the weights into the module."""

    def sleep(self) -> None:
        """Free the memory that is not needed until `wake`."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights, as `RolloutEngine.update_weights`."""


def rollout_module(
    architecture: ArchitectureConfig, groups: ParallelGroups, dtype: torch.dtype
) -> tuple[TransformerModel, Rounds]:
    """Build a module with all layers and this rank's experts, without gradients, and its rounds."""
    tp, ep = groups.tp.size(), groups.ep.size()
    config = transformer_config(architecture, tp, 1, False, dtype)
    # Set afterwards, because megatron-core 0.12 refuses TP and EP without sequence parallelism.
    config.expert_model_parallel_size = ep
    with groups.active():
        module = TransformerModel(config, architecture, Head.LANGUAGE_MODEL, True, True)
    exchange = Exchange(groups.ep, groups.tp)
    layers = share_experts(module, exchange) if ep > 1 else []
    return module.requires_grad_(False), Rounds(layers, exchange, groups.ep_host)


Place = tuple[int, int, int, int]
"""Tensor-parallel rank and size, expert-parallel rank and size."""


class OwnWeights:
    """A module that keeps its own weights on the device, which it does not share with training."""

    def __init__(
        self, architecture: ArchitectureConfig, tp: int, dtype: torch.dtype, seed: int, ep: int = 1
    ) -> None:
        """Build the module with weights of 0. A collective over the world."""
        self.architecture = architecture
        self.groups = ParallelGroups(tp, 1, seed, ep=ep)
        module, self.rounds = rollout_module(architecture, self.groups, dtype)
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
        parameters, tp, ep = dict(self.module.named_parameters()), self.groups.tp, self.groups.ep
        place = tp.rank(), tp.size(), ep.rank(), ep.size()
        load_stream(parameters, self.architecture, place, tensors)


@dataclass(frozen=True)
class _Piece:
    """A slice of a Hugging Face tensor, and its place in a parameter."""

    target: Tensor
    dim: int
    start: int  # in the Hugging Face tensor
    offset: int  # in the target
    size: int

    def fill(self, tensor: Tensor) -> None:
        piece = tensor.narrow(self.dim, self.start, self.size)
        self.target.narrow(self.dim, self.offset, self.size).copy_(piece)


@torch.no_grad()
def load_stream(
    parameters: dict[str, torch.nn.Parameter],
    architecture: ArchitectureConfig,
    place: Place,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Fill a rank's parameters, of all layers, from Hugging Face tensors, one at a time.

    parameters: by their Megatron names
    tensors:    each with its Hugging Face name, whole, in any order, on any device
    Raises ValueError for a tensor that is missing or unknown, or has another shape.
    """
    pieces = _pieces(parameters, architecture, place)
    shapes = hf_shapes(architecture, Head.LANGUAGE_MODEL)
    missing = set(pieces)
    for name, tensor in tensors:
        if name not in missing:
            known = "was sent already" if name in pieces else "is no tensor of this model"
            raise ValueError(f"{name} {known}; send each tensor of the model once")
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"{name} must have the shape {shapes[name]}, not {tuple(tensor.shape)}; send the "
                "weights of the model that generates"
            )
        for piece in pieces[name]:
            piece.fill(tensor)
        missing.remove(name)
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(pieces)} tensors were not sent, {min(missing)} for one; send "
            "each tensor of the model once"
        )


def _pieces(
    parameters: dict[str, torch.nn.Parameter],
    architecture: ArchitectureConfig,
    place: Place,
) -> dict[str, list[_Piece]]:
    """Map each Hugging Face name to its slices on this rank; a list may be empty."""
    tp_rank, tp, ep_rank, ep = place
    found: dict[str, list[_Piece]] = {
        name: [] for name in hf_shapes(architecture, Head.LANGUAGE_MODEL)
    }
    for parameter in stage_parameters(architecture, Head.LANGUAGE_MODEL, ep_rank=ep_rank, ep=ep):
        target, offset = parameters[parameter.name].data, 0
        for part in shard_slices(parameter, architecture, tp_rank, tp):
            piece = _Piece(target, part.dim, part.start, offset, part.size)
            found[part.source].append(piece)
            offset += part.size
    return found
