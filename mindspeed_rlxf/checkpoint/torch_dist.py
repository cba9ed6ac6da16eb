"""Megatron's sharded checkpoints (`torch_dist`): global tensors in chunks, whatever the layout.

Layers (and experts) of the same name are one tensor with an axis more. `.metadata` names the chunks
and where they lie in the `.distcp` files; every chunk is what `torch.save` writes for a tensor.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from mindspeed_rlxf.checkpoint.inert_pickle import read_pickle
from mindspeed_rlxf.checkpoint.inside import inside
from mindspeed_rlxf.checkpoint.layout import ITERATION, MegatronLayout
from mindspeed_rlxf.checkpoint.legacy import (
    RM_HEAD_BIAS,
    MakeShard,
    checkpoint_arguments,
    shard_shape,
    zero_bias,
)
from mindspeed_rlxf.checkpoint.reader import (
    IGNORED,
    MegatronWeights,
    find,
    is_optional,
    refuse,
    spellings,
)
from mindspeed_rlxf.checkpoint.torch_file import MappedFile, Range, StoredTensor, read_window
from mindspeed_rlxf.checkpoint.torch_file_writer import PlannedTensor
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    OUTPUT_LAYER,
    RM_HEAD,
    Head,
    Split,
    StageParameter,
    hf_shape,
    shard_slices,
    stage_parameters,
)

METADATA = ".metadata"
BACKEND = "metadata.json"
COMMON = "common.pt"
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


def read_torch_dist(folder: Path, architecture: ArchitectureConfig) -> MegatronWeights:
    """The weights of the checkpoint in `folder`.

    Errors: ValueError when it is damaged or holds another model.
    """
    tensors = _global_tensors(folder)
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


def _global_tensors(folder: Path) -> dict[str, GlobalTensor]:
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = read_pickle(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy the folder again") from None
    try:
        return _tensors_of(metadata, folder)
    except (AttributeError, TypeError, KeyError, IndexError) as error:
        raise ValueError(
            f"{path} is of another kind than torch.distributed.checkpoint writes ({error!r})"
        ) from None


def _tensors_of(metadata: Any, folder: Path) -> dict[str, GlobalTensor]:
    places = {}
    for index, info in metadata.storage_data.items():
        offset = getattr(index, "offset", None)
        if offset is not None:
            places[index.fqn, tuple(offset)] = info
    files: dict[str, MappedFile] = {}
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry).__name__ != "TensorStorageMetadata" or "optimizer" in name:
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
        tensors[name] = GlobalTensor(dtype, tuple(entry.size), tuple(chunks))
    return tensors


@dataclass(frozen=True)
class DistFile:
    """The `.distcp` file of one rank, to be written."""

    layout: MegatronLayout
    architecture: ArchitectureConfig
    head: Head
    rank: tuple[int, int, int]
    number: int

    @property
    def path(self) -> str:
        return f"__{self.number}_0.distcp"

    def chunks(self, shard: MakeShard) -> Iterator[tuple[str, list[int], list[int], PlannedTensor]]:
        """Name, size of the whole, offsets, and the tensor: what this rank alone has to write."""
        layout, a, (tp_rank, pp_rank, ep_rank) = self.layout, self.architecture, self.rank
        for chunk in range(layout.chunks):
            layers = layout.stages[pp_rank][chunk]
            for parameter in layout.parameters(a, self.head, pp_rank, chunk, ep_rank):
                again = parameter.expert is None and ep_rank > 0
                again = again or (parameter.split is Split.REPLICATED and tp_rank > 0)
                tied = parameter.name == OUTPUT_LAYER.name and (
                    "embed_tokens" in parameter.sources[0]
                )
                if again or tied:
                    continue
                yield from self._chunks_of(parameter, layers, shard(parameter, tp_rank))
                if parameter.name == RM_HEAD.name and tp_rank == 0:
                    bias = zero_bias(shard(parameter, 0).dtype)
                    yield RM_HEAD_BIAS, [1], [0], bias

    def _chunks_of(
        self, parameter: StageParameter, layers: range, planned: PlannedTensor
    ) -> Iterator[tuple[str, list[int], list[int], PlannedTensor]]:
        a, tp, tp_rank = self.architecture, self.layout.tp, self.rank[0]
        name = LAYER.sub(lambda m: f"decoder.layers.{layers[int(m.group(1))]}.", parameter.name)
        key, index = global_name(name, parameter.expert)
        key = spellings(key)[-1] if index else key
        lead = [a.num_layers, a.num_experts or 0][: len(index)]
        dim = 1 if parameter.split is Split.COLUMNS else 0
        copies = 1 if parameter.split is Split.REPLICATED else tp
        shape = list(planned.shape)
        whole = [n * copies if axis == dim else n for axis, n in enumerate(shape)]
        boxes = [(tp_rank * shape[dim] if copies > 1 else 0, 0, shape[dim])]
        if parameter.split is Split.GATE_UP:  # whole: all gate rows, then all up rows
            half = shape[0] // 2
            boxes = [(tp_rank * half, 0, half), (half * tp + tp_rank * half, half, half)]
        for start, within, count in boxes:
            offsets = [start if axis == dim else 0 for axis in range(len(shape))]
            yield key, lead + whole, [*index, *offsets], _part(planned, dim, within, count, index)

    def write(
        self, folder: Path, shard: MakeShard, wrote: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        """Returns what `.metadata` has to say of the file."""
        entries = []
        with (folder / self.path).open("wb") as file:
            for name, size, offsets, planned in self.chunks(shard):
                start = file.tell()
                buffer = io.BytesIO() if planned.num_bytes < 1 << 20 else None
                tensor = planned.make()
                torch.save(tensor, buffer or file)
                # Older versions of torch keep what they saved until the garbage collector comes.
                tensor.untyped_storage().resize_(0)
                if buffer is not None:  # many small writes take long
                    file.write(buffer.getbuffer())
                wrote(planned.num_bytes)
                entries.append(
                    {
                        "name": name,
                        "size": size,
                        "offsets": offsets,
                        "sizes": list(planned.shape),
                        "dtype": str(planned.dtype).removeprefix("torch."),
                        "start": start,
                        "length": file.tell() - start,
                    }
                )
            file.flush()
            os.fsync(file.fileno())
        return entries

    def num_bytes(self, shard: MakeShard) -> int:
        return sum(planned.num_bytes for *_, planned in self.chunks(shard))


def _part(
    planned: PlannedTensor, dim: int, start: int, count: int, index: tuple[int, ...]
) -> PlannedTensor:
    """Rows or columns of a tensor, with an axis of one for each number of `index`."""
    shape = tuple(count if axis == dim else n for axis, n in enumerate(planned.shape))

    def make() -> Tensor:
        part = planned.make().narrow(dim, start, count)
        return part.reshape((1,) * len(index) + shape).clone()

    return PlannedTensor((1,) * len(index) + shape, planned.dtype, make)


def dist_files(
    layout: MegatronLayout, architecture: ArchitectureConfig, head: Head
) -> Iterator[DistFile]:
    """The files of all ranks that write something."""
    for number, rank in enumerate(layout.ranks()):
        if rank[2] == 0 or architecture.num_experts is not None:
            yield DistFile(layout, architecture, head, rank, number)


def write_metadata(
    folder: Path,
    files: dict[str, list[dict[str, Any]]],
    layout: MegatronLayout,
    architecture: ArchitectureConfig,
    head: Head,
    dtype: torch.dtype,
) -> None:
    """What makes the files a checkpoint. files: of each, what `DistFile.write` returned."""
    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for file, entries in files.items():
        for entry in entries:
            offsets, sizes = torch.Size(entry["offsets"]), torch.Size(entry["sizes"])
            tensor = described.setdefault(
                entry["name"],
                dcp.TensorStorageMetadata(
                    dcp.TensorProperties(dtype=getattr(torch, entry["dtype"])),
                    torch.Size(entry["size"]),
                    [],
                ),
            )
            tensor.chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
            index = dcp.MetadataIndex(entry["name"], offsets)
            places[index] = _StorageInfo(file, entry["start"], entry["length"])
    _extra_states(folder, architecture, head, described, places)
    with (folder / METADATA).open("wb") as file_:
        # Older versions of torch look into planner_data without asking whether it is there.
        pickle.dump(dcp.Metadata(described, planner_data={}, storage_data=places), file_)
    common = {
        "args": checkpoint_arguments(architecture, layout, dtype),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
    }
    torch.save(common, folder / COMMON)
    backend = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (folder / BACKEND).write_text(json.dumps(backend), encoding="utf-8")


EXTRA_STATES = "__extra_0.distcp"


def _extra_states(
    folder: Path,
    a: ArchitectureConfig,
    head: Head,
    described: dict[str, Any],
    places: dict[Any, Any],
) -> None:
    """Megatron's linear layers ask for an `_extra_state`, which is empty without fp8."""
    empty = io.BytesIO()
    torch.save([None], empty)
    (folder / EXTRA_STATES).write_bytes(empty.getvalue())
    linear = re.compile(r"\.(linear_\w+)\.weight$")
    for parameter in stage_parameters(a, head):
        if not linear.search(parameter.name):
            continue
        name, index = global_name(parameter.name, parameter.expert)
        sizes = [a.num_layers, a.num_experts][: len(index)]
        where = f"{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"
        key = f"{name.removesuffix('weight')}_extra_state/shard_{where}"
        described[key] = dcp.BytesStorageMetadata()
        places[dcp.MetadataIndex(key)] = _StorageInfo(EXTRA_STATES, 0, len(empty.getvalue()))
