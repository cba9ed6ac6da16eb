"""The module that generates, and the weights in it: its own, or those of the module that trains."""

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
from mindspeed_rlxf.models.parameters import Head, hf_shapes, shard_slices, stage_parameters
from mindspeed_rlxf.models.transformer import TransformerModel, transformer_config


class WeightSource(Protocol):
    """Where the native engine's weights are."""

    @property
    def module(self) -> TransformerModel: ...

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Megatron sees the module's parallel groups inside the block."""

    def wake(self) -> None:
        """The module has its weights afterwards."""

    def sleep(self) -> None:
        """Free what is not needed until `wake`."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """As `RolloutEngine.update_weights`."""


def rollout_module(
    architecture: ArchitectureConfig, tp: int, dtype: torch.dtype
) -> TransformerModel:
    """The whole depth with all experts, under the parallel groups that are active."""
    config = transformer_config(architecture, tp, 1, False, dtype)
    module = TransformerModel(config, architecture, Head.LANGUAGE_MODEL, True, True)
    return module.requires_grad_(False)


class OwnWeights:
    """A module with memory of its own, which it keeps while it sleeps: nobody else is there."""

    def __init__(
        self, architecture: ArchitectureConfig, tp: int, dtype: torch.dtype, seed: int
    ) -> None:
        """Weights are 0 until they arrive. A collective over the world."""
        self.architecture = architecture
        self.groups = ParallelGroups(tp, 1, seed)
        with self.groups.active():
            module = rollout_module(architecture, tp, dtype)
        self.module = module.to(device=device.current_device(), dtype=dtype)
        for parameter in self.module.parameters():
            parameter.data.zero_()  # the vocabulary's padding, which nobody sends

    def active(self) -> contextlib.AbstractContextManager[None]:
        return self.groups.active()

    def wake(self) -> None:
        """They are there."""

    def sleep(self) -> None:
        """Only training on the same devices would need the room."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        parameters, tp = dict(self.module.named_parameters()), self.groups.tp
        load_stream(parameters, self.architecture, tp.rank(), tp.size(), tensors)


@dataclass(frozen=True)
class _Piece:
    """A slice of a Hugging Face tensor, and where it goes."""

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
    tp_rank: int,
    tp: int,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Fill a rank's parameters of the whole depth from Hugging Face tensors, one at a time.

    parameters: by their Megatron names
    tensors:    each with its Hugging Face name, whole, in any order, on any device
    Raises ValueError for a tensor that is missing or unknown, or has another shape.
    """
    pieces = _pieces(parameters, architecture, tp_rank, tp)
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
    tp_rank: int,
    tp: int,
) -> dict[str, list[_Piece]]:
    """Hugging Face name -> where its slices go on this rank, which may need none of them."""
    found: dict[str, list[_Piece]] = {}
    for parameter in stage_parameters(architecture, Head.LANGUAGE_MODEL):
        for source in parameter.sources:
            found.setdefault(source, [])
        target, offset = parameters[parameter.name].data, 0
        for part in shard_slices(parameter, architecture, tp_rank, tp):
            piece = _Piece(target, part.dim, part.start, offset, part.size)
            found[part.source].append(piece)
            offset += part.size
    return found
