"""One way to read weights: slices by Hugging Face names, whatever lies in the folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    OUTPUT_LAYER,
    RM_HEAD,
    SCORE_HEAD,
    Slice,
    StageParameter,
    hf_shape,
)
from mindspeed_rlxf.weights.torch_file import Range

MAX_PROBLEMS = 8  # of one folder: the first few tell which model it is

IGNORED = re.compile(r"_extra_state|rotary_pos_emb\.inv_freq$|rotary_emb\.inv_freq$")
"""Stored beside the weights, and no weights."""


class WeightReader(Protocol):
    """The tensors of a folder by their Hugging Face names; counts the bytes that were read."""

    bytes_read: int

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, part: Slice) -> Tensor: ...


class Stored(Protocol):
    """A Megatron tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, *ranges: Range) -> Tensor: ...


@dataclass(frozen=True)
class Piece:
    """A slice of a Hugging Face tensor, and where in a stored one: `offset` along its axis."""

    part: Slice
    stored: Stored
    offset: int

    def read(self, ranges: list[Range]) -> Tensor:
        """ranges: of each axis of the Hugging Face tensor, inside `part`."""
        dim, shift = self.part.dim, self.offset - self.part.start
        shifted = list(ranges)
        shifted[dim] = (ranges[dim][0] + shift, ranges[dim][1] + shift)
        return self.stored.read(*shifted)


class MegatronWeights:
    """A Megatron checkpoint, read slice by slice by Hugging Face names."""

    def __init__(self, folder: Path, architecture: ArchitectureConfig) -> None:
        self.folder, self.architecture = folder, architecture
        self.bytes_read = 0
        self.dropped_bias: float | None = None  # of a reward head: Hugging Face has none
        self._pieces: dict[str, list[Piece]] = {}

    def add(self, parts: Iterable[Slice], stored: Stored) -> None:
        """The parts lie one after the other in `stored`."""
        offset = 0
        for part in parts:
            known = self._pieces.setdefault(part.source, [])
            if part.size:
                known.append(Piece(part, stored, offset))
            offset += part.size

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def names(self) -> list[str]:
        return list(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        assert name in self._pieces, name
        return hf_shape(name, self.architecture)

    def dtype(self, name: str) -> torch.dtype:
        return self._pieces[name][0].stored.dtype

    def read(self, part: Slice) -> Tensor:
        """Just the bytes of one slice."""
        wanted = [(0, size) for size in self.shape(part.source)]
        wanted[part.dim] = (part.start, part.stop)
        return self.read_ranges(part.source, wanted)

    def read_ranges(self, name: str, wanted: list[Range]) -> Tensor:
        """Just the bytes of these ranges of each axis."""
        shape = [stop - start for start, stop in wanted]
        result = torch.zeros(shape, dtype=self.dtype(name))
        filled = 0
        for piece in self._pieces[name]:
            dim = piece.part.dim
            start = max(wanted[dim][0], piece.part.start)
            stop = min(wanted[dim][1], piece.part.stop)
            if start < stop:
                ranges = [*wanted[:dim], (start, stop), *wanted[dim + 1 :]]
                target = result.narrow(dim, start - wanted[dim][0], stop - start)
                filled += target.copy_(piece.read(ranges)).numel()
        if filled != result.numel():
            raise ValueError(
                f"{self.folder} has {filled} of the {result.numel()} numbers of {name}; copy the "
                "whole folder again"
            )
        self.bytes_read += result.numel() * result.element_size()
        return result

    def dim(self, name: str) -> int:
        """The axis along which the tensor is split."""
        return self._pieces[name][0].part.dim


def spellings(name: str) -> list[str]:
    """The names a parameter may have: with local layers, with fused ones, in our own checkpoints.

    Megatron stores the norm before a linear layer under that layer's name where both are one
    module (Transformer Engine), and always so in sharded checkpoints.
    """
    fused = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    if name == RM_HEAD.name:
        return [name, SCORE_HEAD.name]
    for ours, theirs in fused.items():
        if name.endswith(ours):
            return [name, name.removesuffix(ours) + theirs]
    return [name]


def find(parameter: StageParameter, tensors: Mapping[str, Stored]) -> tuple[str, Stored] | None:
    """The spelling under which a parameter is stored, and its tensor."""
    for name in spellings(parameter.name):
        if name in tensors:
            return name, tensors[name]
    return None


def is_optional(parameter: StageParameter) -> bool:
    """A head, of which a checkpoint has one or none; who needs it says so."""
    return parameter.name in (OUTPUT_LAYER.name, RM_HEAD.name)


def refuse(folder: Path, problems: list[str]) -> None:
    """Raises ValueError that lists how the folder differs from the model, if it does."""
    if not problems:
        return
    more = len(problems) - MAX_PROBLEMS
    shown = problems[:MAX_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
    raise ValueError(
        f"{folder} holds another model than config.json describes: {'; '.join(shown)}; "
        "give the config.json of that model"
    )
