"""Megatron's sharded checkpoints (`torch_dist`): global tensors in boxes, for any layout.

Layers (and experts) of the same name are one tensor with an axis more. `.metadata` names the boxes
and where they lie in the `.distcp` files; every box is what `torch.save` writes for a tensor.
"""

import io
import json
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    RM_HEAD,
    Head,
    StageParameter,
    stage_parameters,
)
from mindspeed_rlxf.weights.boxes import (
    RM_HEAD_BIAS,
    Box,
    BoxedTensor,
    MakeShard,
    MegatronWeights,
    PlannedFile,
    PlannedTensor,
    Shape,
    StoredBox,
    Wrote,
    find,
    refuse,
    spellings,
    unknown_names,
    whole,
)
from mindspeed_rlxf.weights.formats import COMMON, METADATA
from mindspeed_rlxf.weights.legacy import checkpoint_arguments, zero_bias
from mindspeed_rlxf.weights.megatron_layout import ITERATION, MegatronLayout
from mindspeed_rlxf.weights.pickled import load_pickled, read_metadata

LAYER = re.compile(r"^decoder\.layers\.(\d{1,9})\.")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
EXTRA_STATES = "__extra_0.distcp"
SMALL = 1 << 20  # bytes of a tensor that is written at once

Place = tuple[str, int, int]
"""File, offset and length (bytes) of a stored tensor, which is a file of torch.save in itself."""


class Metadata:
    """The tensors of a sharded checkpoint by name."""

    def __init__(self, folder: Path, trust_files: bool = False) -> None:
        """Read `.metadata` of the folder."""
        self.folder, self._trust_files = folder, trust_files
        self._last: tuple[Place, Tensor] | None = None  # several boxes are read from one
        content = read_metadata(folder / METADATA)
        try:
            places = dict(map(_read_place, content.state["storage_data"].items()))
            self.tensors = {
                name: self._boxed(name, entry.state, places)
                for name, entry in content.state["state_dict_metadata"].items()
                if type(entry).__name__ == "TensorStorageMetadata"
            }
        except (AttributeError, TypeError, KeyError, ValueError, IndexError) as error:
            raise ValueError(
                f"{folder / METADATA} is not as torch.distributed.checkpoint writes it "
                f"({error!r:.200}); copy the folder again"
            ) from None
        ends: dict[str, int] = {}
        for file, offset, length in places.values():
            ends[file] = max(ends.get(file, 0), offset + length)
        for file, end in ends.items():
            size = (folder / file).stat().st_size if (folder / file).is_file() else 0
            if size < end:
                rule = f"{folder / file} is missing or truncated: {size} of {end} bytes are there"
                raise ValueError(f"{rule}; copy it again")

    def _boxed(self, name: str, entry: dict[str, Any], places: dict[Any, Place]) -> BoxedTensor:
        properties = entry["properties"].state
        dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        tensor = BoxedTensor(f"{name} of {self.folder}", dtype, tuple(entry["size"]), [])
        for chunk in entry["chunks"]:
            box = Box(tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"]))
            read = partial(self._read, places[name, box.starts], box, dtype)
            tensor.boxes.append(StoredBox(box, read))
        return tensor

    def _read(self, place: Place, box: Box, dtype: torch.dtype, wanted: Box) -> Tensor:
        """Return a copy of the box `wanted` of the tensor, from the place where `box` is stored."""
        if self._last is None or self._last[0] != place:
            self._last = None  # one of them is in memory at a time
            name, offset, length = place
            path = self.folder / name
            with path.open("rb") as file:
                file.seek(offset)
                stored = load_pickled(io.BytesIO(file.read(length)), path, self._trust_files)
            if not isinstance(stored, Tensor) or (stored.shape, stored.dtype) != (box.shape, dtype):
                raise ValueError(
                    f"{path}: no tensor of shape {list(box.shape)} where {METADATA} has one; copy "
                    "the folder again"
                )
            self._last = place, stored
        return self._last[1][wanted.relative_to(box).slices].clone()


def _read_place(entry: tuple[Any, Any]) -> tuple[tuple[str, tuple[int, ...]], Place]:
    """Return ((tensor name, first element of its box), where it is stored) of an entry."""
    index, info = (each.state for each in entry)
    if info.get("transform_descriptors"):
        raise ValueError("compressed entries are not read")
    name, offset, length = info["relative_path"], info["offset"], info["length"]
    if Path(name).name != name or min(offset, length) < 0:
        raise ValueError(f"no place: {name!r:.80}, {offset}, {length}")
    return (index["fqn"], tuple(index.get("offset") or ())), (name, offset, length)


def read_torch_dist(
    metadata: Metadata, architecture: ArchitectureConfig, prefix: str = ""
) -> MegatronWeights:
    """Return the weights in a checkpoint, or with `prefix` an optimizer state of each weight.

    Raises ValueError if the checkpoint is damaged or has another model.
    """
    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in metadata.tensors.items()
        if (name.startswith(prefix) if prefix else "optimizer" not in name)
    }
    weights = MegatronWeights(metadata.folder, architecture)
    layout = MegatronLayout(1, 1, ((range(architecture.num_layers),),))
    problems: list[str] = []
    used = set()
    for parameter in layout.parameters_of_any_head(architecture, 0, 0, 0):
        found = _find(parameter, tensors)
        problems += weights.add_shard(parameter, found, 0, 1)
        used.add(found[0] if found else "")
    # Under one name, several layers: more of them than the model has must not go unseen.
    stacked = [n for n in tensors if n.startswith("decoder.layers.") and not LAYER.match(n)]
    for name in unknown_names(stacked, set()):
        layers = tensors[name].size[:1]
        if layers != (architecture.num_layers,):
            there = f"{sum(layers)} layers, the model has {architecture.num_layers}"
            problems.append(f"{name} has {there}")
    extra = (name for name in tensors if "optimizer" not in name)
    problems += [f"{name} is not in the model" for name in unknown_names(extra, used)]
    weights.note_bias(tensors.get(RM_HEAD_BIAS))
    refuse(metadata.folder, problems)
    return weights


def _find(
    parameter: StageParameter, tensors: dict[str, BoxedTensor]
) -> tuple[str, BoxedTensor] | None:
    """Return (stored name, tensor) of a parameter, or None.

    It is stored under a name of its own, or inside a tensor that stacks all layers (or experts).
    """
    alone = find(parameter, tensors)
    if alone is not None:
        return alone
    key, index = global_name(parameter.name, parameter.expert)
    for name in spellings(key) if index else []:
        stored = tensors.get(name)
        fits = stored is not None and len(stored.size) > len(index)
        if stored and fits and all(i < n for i, n in zip(index, stored.size, strict=False)):
            return name, replace(stored, index=index)
    return None


def global_name(name: str, expert: int | None) -> tuple[str, Shape]:
    """Return (name of the tensor of all layers, and experts, parameter's index in it).

    The index is (layer,), with an expert (layer, expert), for a parameter outside layers (). `name`
    has the global number of its layer.
    """
    layer = LAYER.match(name)
    if layer is None:
        return name, ()
    index = (int(layer.group(1)), *(() if expert is None else (expert,)))
    return EXPERT.sub(".experts.", LAYER.sub("decoder.layers.", name)), index


PlannedBox = tuple[str, Shape, Box, PlannedTensor]
"""A box to be written: name and shape of the global tensor, the box, its elements."""
Entry = tuple[str, Shape, Box, torch.dtype, int, int]
"""A box that is written: name and shape of the global tensor, box, dtype, start, length (bytes)."""


def dist_files(
    layout: MegatronLayout,
    architecture: ArchitectureConfig,
    head: Head,
    shard: MakeShard,
    folder: str,
) -> Iterator[PlannedFile]:
    """Yield the planned `.distcp` file of each pipeline rank; the layout has no other ranks.

    `PlannedFile.write` returns the file's entries for `write_metadata`. Any layout can load them.
    """
    for pp_rank in range(layout.pp):
        boxes: list[PlannedBox] = []
        for chunk, layers in enumerate(layout.stages[pp_rank]):
            for parameter in layout.parameters(architecture, head, pp_rank, chunk, 0):
                if not parameter.is_tied_output_layer:
                    planned = shard(parameter, 0)
                    boxes.append(_plan_box(parameter, architecture, layers, planned))
                    if parameter.name == RM_HEAD.name:
                        boxes.append((RM_HEAD_BIAS, (1,), whole((1,)), zero_bias(planned.dtype)))
        num_bytes = sum(planned.num_bytes for *_, planned in boxes)
        write = partial(_write_boxes, boxes=boxes)
        yield PlannedFile(f"{folder}/__{pp_rank}_0.distcp", num_bytes, write)


def _plan_box(
    parameter: StageParameter, a: ArchitectureConfig, layers: range, planned: PlannedTensor
) -> PlannedBox:
    """Plan the box of a parameter in the global tensor of all layers (and experts).

    layers: of the parameter's chunk, by their global numbers
    """
    name = LAYER.sub(lambda m: f"decoder.layers.{layers[int(m.group(1))]}.", parameter.name)
    key, index = global_name(name, parameter.expert)
    key = spellings(key)[-1] if index else key
    size = (a.num_layers, a.num_experts or 0)[: len(index)] + planned.shape
    box = Box(index + (0,) * len(planned.shape), (1,) * len(index) + planned.shape)
    stacked = PlannedTensor(box.shape, planned.dtype, lambda: planned.make().view(box.shape))
    return key, size, box, stacked


def _write_boxes(path: Path, boxes: list[PlannedBox], wrote: Wrote) -> list[Entry]:
    """Write boxes to a file with torch.save, one after the other, and fsync it.

    Frees the storage of the tensors that `make` returned. Returns the entries for `.metadata`.
    """
    entries = []
    with path.open("wb") as file:
        for name, size, box, planned in boxes:
            start = file.tell()
            buffer = io.BytesIO() if planned.num_bytes < SMALL else None
            tensor = planned.make()
            torch.save(tensor, buffer or file)
            # Older versions of torch keep what they saved until the garbage collector comes.
            tensor.untyped_storage().resize_(0)
            if buffer is not None:  # many small writes take long
                file.write(buffer.getbuffer())
            wrote(planned.num_bytes)
            entries.append((name, size, box, planned.dtype, start, file.tell() - start))
        file.flush()
        os.fsync(file.fileno())
    return entries


def write_metadata(
    folder: Path,
    files: dict[str, list[Entry]],
    layout: MegatronLayout,
    architecture: ArchitectureConfig,
    head: Head,
    dtype: torch.dtype,
) -> None:
    """Write `.metadata`, `common.pt`, `metadata.json` and the empty extra states to `folder`.

    `files` are the names of the data files, with the entries of their boxes.
    """
    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for file, entries in files.items():
        for name, size, box, stored_as, start, length in entries:
            properties = dcp.TensorProperties(dtype=stored_as)
            empty = dcp.TensorStorageMetadata(properties, torch.Size(size), [])
            offsets = torch.Size(box.starts)
            chunk = dcp.ChunkStorageMetadata(offsets, torch.Size(box.shape))
            described.setdefault(name, empty).chunks.append(chunk)
            places[dcp.MetadataIndex(name, offsets)] = _StorageInfo(file, start, length)
    _add_extra_states(folder, architecture, head, described, places)
    with (folder / METADATA).open("wb") as stream:
        # Older versions of torch read planner_data without checking that it exists.
        pickle.dump(dcp.Metadata(described, planner_data={}, storage_data=places), stream)
    common = {
        "args": checkpoint_arguments(architecture, layout, dtype),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
    }
    torch.save(common, folder / COMMON)
    backend: dict[str, Any] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backend |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backend), encoding="utf-8")


def _add_extra_states(
    folder: Path,
    a: ArchitectureConfig,
    head: Head,
    described: dict[str, Any],
    places: dict[Any, Any],
) -> None:
    """Write the pickled [None] that the `_extra_state`s of all linear layers share.

    Adds their entries to `described` and `places`.
    """
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
