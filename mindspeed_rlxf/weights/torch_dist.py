"""Reads Megatron's sharded checkpoints (`torch_dist`): global tensors in chunks, for any layout.

Layers (and experts) of the same name are one tensor with an axis more. `.metadata` names the chunks
and where they lie in the `.distcp` files; every chunk is what `torch.save` writes for a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    OUTPUT_LAYER,
    Head,
    Split,
    StageParameter,
    hf_shape,
    shard_slices,
)
from mindspeed_rlxf.weights.dist_metadata import Metadata, check_objects, read_metadata
from mindspeed_rlxf.weights.formats import METADATA
from mindspeed_rlxf.weights.layout import MegatronLayout
from mindspeed_rlxf.weights.legacy import RM_HEAD_BIAS, shard_shape
from mindspeed_rlxf.weights.reader import (
    IGNORED,
    MegatronWeights,
    find,
    is_optional,
    refuse,
    spellings,
)
from mindspeed_rlxf.weights.torch_file import Range, StoredTensor, Window, read_window

LAYER = re.compile(r"^decoder\.layers\.(\d{1,9})\.")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Chunk:
    """A box of a global tensor, and the part of a file that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Window

    def tensor(self, dtype: torch.dtype) -> StoredTensor:
        """Errors: ValueError when the file holds something else there."""
        stored = read_window(self.place)
        if type(stored) is not StoredTensor or (stored.shape, stored.dtype) != (self.sizes, dtype):
            raise ValueError(
                f"{self.place.file.path}: no tensor of shape {list(self.sizes)} where "
                f"{METADATA} has one; copy the folder again"
            )
        return stored


@dataclass(frozen=True)
class GlobalTensor:
    """A global tensor, or with `index` one layer (and expert) of it."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    index: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size[len(self.index) :]

    def read(self, *ranges: Range) -> Tensor:
        """A copy of the named ranges of each axis."""
        result = torch.zeros([stop - start for start, stop in ranges], dtype=self.dtype)
        filled = 0
        for chunk in self.chunks:
            boxes = list(zip(chunk.offsets, chunk.sizes, strict=True))
            lead, rest = boxes[: len(self.index)], boxes[len(self.index) :]
            inside = all(o <= i < o + n for i, (o, n) in zip(self.index, lead, strict=True))
            overlap = [
                (max(start, o), min(stop, o + n))
                for (start, stop), (o, n) in zip(ranges, rest, strict=True)
            ]
            if not inside or any(start >= stop for start, stop in overlap):
                continue
            stored = chunk.tensor(self.dtype)
            for i, (offset, _) in zip(self.index, lead, strict=True):
                stored = stored.at(i - offset)
            shifted = [(s - o, e - o) for (s, e), (o, _) in zip(overlap, rest, strict=True)]
            target = result[
                tuple(
                    slice(s - start, e - start)
                    for (s, e), (start, _) in zip(overlap, ranges, strict=True)
                )
            ]
            filled += target.copy_(stored.read(*shifted)).numel()
        if filled != result.numel():
            raise ValueError(f"chunks of a tensor are missing in {METADATA}; copy the folder again")
        return result


def open_torch_dist(folder: Path) -> Metadata:
    """What `read_torch_dist` takes weights from.

    Errors: ValueError where the folder is damaged or holds more than data.
    """
    metadata = read_metadata(folder)
    check_objects(metadata)
    return metadata


def read_torch_dist(
    metadata: Metadata, architecture: ArchitectureConfig, prefix: str = ""
) -> MegatronWeights:
    """The weights of the checkpoint.

    prefix: of the names of what the optimizer holds of them, which is read in their place
    Errors: ValueError when it is damaged or holds another model.
    """
    folder = metadata.folder
    tensors = _global_tensors(metadata, prefix)
    weights = MegatronWeights(folder, architecture)
    table = {
        p.name: p
        for head in Head
        for p in MegatronLayout(1, 1, ((range(architecture.num_layers),),)).parameters(
            architecture, head, 0, 0, 0
        )
    }
    problems: list[str] = []
    used = {RM_HEAD_BIAS, OUTPUT_LAYER.name}
    for parameter in table.values():
        found = _find(parameter, tensors)
        if found is None:
            if not is_optional(parameter):
                problems.append(f"{parameter.name} is missing")
            continue
        used.add(found[0])
        _add(weights, parameter, found, problems)
    # Under one name, several layers: more of them than the model has must not go unseen.
    problems += _layer_problems(tensors, architecture)
    extra = [name for name in tensors.keys() - used if not IGNORED.search(name)]
    problems += [f"{name} is not in the model" for name in sorted(extra) if "optimizer" not in name]
    if RM_HEAD_BIAS in tensors and tensors[RM_HEAD_BIAS].shape == (1,):
        weights.dropped_bias = float(tensors[RM_HEAD_BIAS].read((0, 1)))
    refuse(folder, problems)
    return weights


def _add(
    weights: MegatronWeights,
    parameter: StageParameter,
    found: tuple[str, GlobalTensor],
    problems: list[str],
) -> None:
    a, (name, stored) = weights.architecture, found
    rows = sum(stored.shape[:1]) if parameter.split is Split.VOCAB else None
    expected = shard_shape(parameter, a, 0, 1, rows)
    if not stored.dtype.is_floating_point:
        problems.append(f"{name} is {stored.dtype}, the model needs floating-point numbers")
    elif stored.shape != expected or (rows is not None and rows < a.vocab_size):
        needed = hf_shape(parameter.sources[0], a) if rows is not None else expected
        problems.append(f"{name} is {list(stored.shape)}, the model needs {list(needed)}")
    else:
        weights.add(shard_slices(parameter, a, 0, 1, rows), stored)


def _find(
    parameter: StageParameter, tensors: dict[str, GlobalTensor]
) -> tuple[str, GlobalTensor] | None:
    """The tensor of a parameter: stored for itself, or as a part of that of all layers."""
    alone = find(parameter, tensors)  # type: ignore[arg-type]
    if alone is not None:
        return alone[0], tensors[alone[0]]
    key_of, index = global_name(parameter.name, parameter.expert)
    for name in spellings(key_of):
        stored = tensors.get(name)
        fits = stored is not None and index and len(stored.size) > len(index)
        if (
            stored is not None
            and fits
            and all(i < n for i, n in zip(index, stored.size, strict=False))
        ):
            return name, GlobalTensor(stored.dtype, stored.size, stored.chunks, index)
    return None


def _layer_problems(tensors: dict[str, GlobalTensor], a: ArchitectureConfig) -> Iterator[str]:
    for name, tensor in tensors.items():
        stacked = name.startswith("decoder.layers.") and not LAYER.match(name)
        if stacked and not IGNORED.search(name) and tensor.size[:1] != (a.num_layers,):
            yield f"{name} has {sum(tensor.size[:1])} layers, the model has {a.num_layers}"


def global_name(name: str, expert: int | None) -> tuple[str, tuple[int, ...]]:
    """The name of the tensor of all layers (and experts), and this one's index in it.

    name: with the global index of its layer
    """
    layer = LAYER.match(name)
    if layer is None:
        return name, ()
    index = (int(layer.group(1)), *(() if expert is None else (expert,)))
    return EXPERT.sub(".experts.", LAYER.sub("decoder.layers.", name)), index


def _global_tensors(metadata: Metadata, prefix: str) -> dict[str, GlobalTensor]:
    """Those whose name starts with `prefix`, without it; "" = the weights."""
    tensors = {}
    for name in metadata.names():
        if name.startswith(prefix) if prefix else "optimizer" not in name:
            found = metadata.tensor(name)
            chunks = tuple(Chunk(*box, place) for box, place in found.chunks)
            tensors[name.removeprefix(prefix)] = GlobalTensor(found.dtype, found.size, chunks)
    return tensors
