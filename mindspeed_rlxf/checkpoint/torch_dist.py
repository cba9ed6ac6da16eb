"""Reads Megatron's sharded checkpoints (`torch_dist`): global tensors in chunks, for any layout.

Layers (and experts) of the same name are one tensor with an axis more. `.metadata` names the chunks
and where they lie in the `.distcp` files; every chunk is what `torch.save` writes for a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rlxf.checkpoint.formats import METADATA
from mindspeed_rlxf.checkpoint.inert_pickle import read_pickle
from mindspeed_rlxf.checkpoint.inside import inside
from mindspeed_rlxf.checkpoint.layout import MegatronLayout
from mindspeed_rlxf.checkpoint.legacy import RM_HEAD_BIAS, shard_shape
from mindspeed_rlxf.checkpoint.reader import (
    IGNORED,
    MegatronWeights,
    find,
    is_optional,
    refuse,
    spellings,
)
from mindspeed_rlxf.checkpoint.torch_file import MappedFile, Range, StoredTensor, read_window
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    OUTPUT_LAYER,
    Head,
    Split,
    StageParameter,
    hf_shape,
    shard_slices,
)

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Chunk:
    """A box of a global tensor, and the part of a file that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: MappedFile
    start: int
    length: int

    def tensor(self) -> StoredTensor:
        """Errors: ValueError when the file holds something else there."""
        stored = read_window(self.file.window(self.start, self.length))
        if not isinstance(stored, StoredTensor) or stored.shape != self.sizes:
            raise ValueError(
                f"{self.file.path}: no tensor of shape {list(self.sizes)} where "
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
        result = torch.empty([stop - start for start, stop in ranges], dtype=self.dtype)
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
            stored = chunk.tensor()
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


def read_torch_dist(
    folder: Path, architecture: ArchitectureConfig, prefix: str = ""
) -> MegatronWeights:
    """The weights of the checkpoint in `folder`.

    prefix: of the names of what the optimizer holds of them, which is read in their place
    Errors: ValueError when it is damaged or holds another model.
    """
    tensors = _global_tensors(folder, prefix)
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
    if RM_HEAD_BIAS in tensors:
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
    rows = stored.shape[0] if parameter.split is Split.VOCAB else None
    expected = shard_shape(parameter, a, 0, 1, rows)
    if stored.shape != expected or (rows is not None and rows < a.vocab_size):
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
        if stacked and not IGNORED.search(name) and tensor.size[0] != a.num_layers:
            yield f"{name} has {tensor.size[0]} layers, the model has {a.num_layers}"


def global_name(name: str, expert: int | None) -> tuple[str, tuple[int, ...]]:
    """The name of the tensor of all layers (and experts), and this one's index in it.

    name: with the global index of its layer
    """
    layer = LAYER.match(name)
    if layer is None:
        return name, ()
    index = (int(layer.group(1)), *(() if expert is None else (expert,)))
    return EXPERT.sub(".experts.", LAYER.sub("decoder.layers.", name)), index


def _global_tensors(folder: Path, prefix: str) -> dict[str, GlobalTensor]:
    """Those whose name starts with `prefix`, without it; "" = the weights."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = read_pickle(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy the folder again") from None
    try:
        return _tensors_of(metadata, folder, prefix)
    except (AttributeError, TypeError, KeyError, IndexError) as error:
        raise ValueError(
            f"{path} is of another kind than torch.distributed.checkpoint writes ({error!r})"
        ) from None


def _tensors_of(metadata: Any, folder: Path, prefix: str) -> dict[str, GlobalTensor]:
    places = {}
    for index, info in metadata.storage_data.items():
        offset = getattr(index, "offset", None)
        if offset is not None:
            places[index.fqn, tuple(offset)] = info
    files: dict[str, MappedFile] = {}
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        wanted = name.startswith(prefix) if prefix else "optimizer" not in name
        if type(entry).__name__ != "TensorStorageMetadata" or not wanted:
            continue
        chunks = []
        for chunk in entry.chunks:
            info = places[name, tuple(chunk.offsets)]
            file = str(info.relative_path)
            if file not in files:
                files[file] = MappedFile(inside(folder, file, METADATA))
            box = tuple(chunk.offsets), tuple(chunk.sizes)
            chunks.append(Chunk(*box, files[file], int(info.offset), int(info.length)))
        dtype = entry.properties.state[0]
        found = GlobalTensor(dtype, tuple(entry.size), tuple(chunks))
        tensors[name.removeprefix(prefix)] = found
    return tensors
