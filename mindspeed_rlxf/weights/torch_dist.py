"""Megatron's sharded checkpoints (`torch_dist`): global tensors in boxes, for any layout.

Layers (and experts) of the same name are one tensor with an axis more. `.metadata` names the boxes
and where they lie in the `.distcp` files; every box is what `torch.save` writes for a tensor.
"""

from __future__ import annotations

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
    Split,
    StageParameter,
    stage_parameters,
)
from mindspeed_rlxf.weights.boxes import Box, BoxedTensor, Shape, whole
from mindspeed_rlxf.weights.dist_metadata import Metadata
from mindspeed_rlxf.weights.formats import COMMON, METADATA
from mindspeed_rlxf.weights.layout import ITERATION, MegatronLayout
from mindspeed_rlxf.weights.legacy import checkpoint_arguments, zero_bias
from mindspeed_rlxf.weights.planned import MakeShard, PlannedFile, PlannedTensor, Wrote
from mindspeed_rlxf.weights.reader import (
    RM_HEAD_BIAS,
    MegatronWeights,
    find,
    refuse,
    spellings,
    unknown_names,
)

LAYER = re.compile(r"^decoder\.layers\.(\d{1,9})\.")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
BACKEND = "metadata.json"
EXTRA_STATES = "__extra_0.distcp"
SMALL = 1 << 20  # bytes of a tensor that is written at once


def read_torch_dist(
    metadata: Metadata, architecture: ArchitectureConfig, prefix: str = ""
) -> MegatronWeights:
    """Return the weights in a checkpoint, or one optimizer state of each weight.

    prefix: prefix of the names of the optimizer state, which is removed; "" = the weights: names
            without "optimizer"
    Raises ValueError when the checkpoint is damaged or has another model.
    """
    tensors = {
        name.removeprefix(prefix): metadata.tensor(name)
        for name in metadata.names()
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
    problems += _layer_problems(tensors, architecture)
    extra = (name for name in tensors if "optimizer" not in name)
    problems += [f"{name} is not in the model" for name in unknown_names(extra, used)]
    weights.note_bias(tensors.get(RM_HEAD_BIAS))
    refuse(metadata.folder, problems)
    return weights


def _find(
    parameter: StageParameter, tensors: dict[str, BoxedTensor]
) -> tuple[str, BoxedTensor] | None:
    """Return (stored name, tensor) of a parameter; None where it is not stored.

    If it is not stored under a name of its own, looks for a tensor that stacks all layers (or
    experts), and returns that with the parameter's index in it as `index`.
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


def _layer_problems(tensors: dict[str, BoxedTensor], a: ArchitectureConfig) -> Iterator[str]:
    """Yield a line for each tensor that stacks all layers, if its first axis is not `num_layers`.

    By name: "decoder.layers." without a number after it; IGNORED names are left out.
    """
    stacked = [n for n in tensors if n.startswith("decoder.layers.") and not LAYER.match(n)]
    for name in unknown_names(stacked, set()):
        layers = tensors[name].size[:1]
        if layers != (a.num_layers,):
            yield f"{name} has {sum(layers)} layers, the model has {a.num_layers}"


def global_name(name: str, expert: int | None) -> tuple[str, Shape]:
    """Return (name of the tensor of all layers, and experts, parameter's index in it).

    name: name of the parameter, with the global number of its layer; a parameter outside layers
          has its own name and the index ()
    The index is (layer,), with an expert (layer, expert).
    """
    layer = LAYER.match(name)
    if layer is None:
        return name, ()
    index = (int(layer.group(1)), *(() if expert is None else (expert,)))
    return EXPERT.sub(".experts.", LAYER.sub("decoder.layers.", name)), index


PlannedBox = tuple[str, Shape, Box, PlannedTensor]
"""A box to be written: name and shape of the global tensor, the box, its numbers."""


def dist_files(
    layout: MegatronLayout,
    architecture: ArchitectureConfig,
    head: Head,
    shard: MakeShard,
    folder: str,
) -> Iterator[PlannedFile]:
    """Yield the planned `.distcp` file of each rank that writes; nothing is written yet.

    Every rank does for a model with experts, else those of expert rank 0. Files are numbered by the
    rank in `MegatronLayout.ranks`. `PlannedFile.write` returns the file's entries for
    `write_metadata`.
    """
    for number, rank in enumerate(layout.ranks()):
        if rank[2] == 0 or architecture.num_experts is not None:
            boxes = list(_boxes_of_rank(layout, architecture, head, rank, shard))
            num_bytes = sum(planned.num_bytes for *_, planned in boxes)
            write = partial(_write_boxes, boxes=boxes)
            yield PlannedFile(f"{folder}/__{number}_0.distcp", num_bytes, write)


def _boxes_of_rank(
    layout: MegatronLayout,
    a: ArchitectureConfig,
    head: Head,
    rank: tuple[int, int, int],
    shard: MakeShard,
) -> Iterator[PlannedBox]:
    """Yield the boxes that this rank writes: those that no earlier rank has too.

    rank: (tp rank, pp rank, ep rank). A reward head on tp rank 0 adds a bias of zeros.
    """
    tp_rank, pp_rank, ep_rank = rank
    for chunk in range(layout.chunks):
        layers = layout.stages[pp_rank][chunk]
        for parameter in layout.parameters(a, head, pp_rank, chunk, ep_rank):
            if parameter.is_first_copy(tp_rank, ep_rank):
                planned = shard(parameter, tp_rank)
                yield from _boxes_of_shard(parameter, a, layers, planned, tp_rank, layout.tp)
                if parameter.name == RM_HEAD.name and tp_rank == 0:
                    yield RM_HEAD_BIAS, (1,), whole((1,)), zero_bias(planned.dtype)


def _boxes_of_shard(
    parameter: StageParameter,
    a: ArchitectureConfig,
    layers: range,
    planned: PlannedTensor,
    tp_rank: int,
    tp: int,
) -> Iterator[PlannedBox]:
    """Yield the boxes in global tensors that a rank's shard of a parameter fills, with their data.

    Two for gate and up of an MLP, else one: (tensor's name, its size, box, data).
    layers: global indices of the layers of the rank's chunk
    planned: the shard
    """
    name = LAYER.sub(lambda m: f"decoder.layers.{layers[int(m.group(1))]}.", parameter.name)
    key, index = global_name(name, parameter.expert)
    key = spellings(key)[-1] if index else key
    lead = (a.num_layers, a.num_experts or 0)[: len(index)]
    dim = 1 if parameter.split is Split.COLUMNS else 0
    copies = 1 if parameter.split is Split.REPLICATED else tp
    axes, rows = len(planned.shape), planned.shape[dim]
    size = tuple(n * copies if axis == dim else n for axis, n in enumerate(planned.shape))
    pieces = [(tp_rank * rows if copies > 1 else 0, 0, rows)]
    if parameter.split is Split.GATE_UP:  # globally all gate rows, then all up rows
        half = rows // 2
        pieces = [(tp_rank * half, 0, half), (half * tp + tp_rank * half, half, half)]
    for start, within, count in pieces:
        shape = tuple(count if axis == dim else n for axis, n in enumerate(planned.shape))
        starts, place = (
            tuple(first if axis == dim else 0 for axis in range(axes)) for first in (start, within)
        )
        box = Box(index + starts, (1,) * len(index) + shape)
        yield key, lead + size, box, _plan_part(planned, Box(place, shape), box.shape)


def _plan_part(planned: PlannedTensor, place: Box, shape: Shape) -> PlannedTensor:
    """Return a planned tensor that is a box of another one, copied and reshaped to `shape`.

    place: the box in the whole tensor, which is made in full to take it
    """

    def make() -> Tensor:
        return planned.make()[place.slices].reshape(shape).clone()

    return PlannedTensor(shape, planned.dtype, make)


def _write_boxes(path: Path, boxes: list[PlannedBox], wrote: Wrote) -> list[dict[str, Any]]:
    """Write boxes to a file with torch.save, one after the other, and fsync it.

    An existing file is replaced. Calls `wrote` after each box. Frees the storage of the tensors
    that `make` returned, which must be its own. Returns the entries for `.metadata`, in order, each
    with start and length (bytes) in the file.
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
            entries.append(
                {
                    "name": name,
                    "size": size,
                    "offsets": box.starts,
                    "sizes": box.shape,
                    "dtype": str(planned.dtype).removeprefix("torch."),
                    "start": start,
                    "length": file.tell() - start,
                }
            )
        file.flush()
        os.fsync(file.fileno())
    return entries


def write_metadata(
    folder: Path,
    files: dict[str, list[dict[str, Any]]],
    layout: MegatronLayout,
    architecture: ArchitectureConfig,
    head: Head,
    dtype: torch.dtype,
) -> None:
    """Write `.metadata`, `common.pt`, `metadata.json` and the empty extra states to `folder`.

    files: name of each data file -> the entries of its boxes, as `PlannedFile.write` returns them
    dtype: named in the arguments in `common.pt`
    """
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
    backend = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (folder / BACKEND).write_text(json.dumps(backend), encoding="utf-8")


def _add_extra_states(
    folder: Path,
    a: ArchitectureConfig,
    head: Head,
    described: dict[str, Any],
    places: dict[Any, Any],
) -> None:
    """Write the file EXTRA_STATES with the pickled [None] that all `_extra_state`s share.

    Adds an entry for each linear layer of each layer (and expert) to `described` and `places`.
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
