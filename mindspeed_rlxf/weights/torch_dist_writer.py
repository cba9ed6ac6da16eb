"""Writes Megatron's sharded checkpoints (`torch_dist`), in the form that `torch_dist` reads."""

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

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    OUTPUT_LAYER,
    RM_HEAD,
    Head,
    Split,
    StageParameter,
    stage_parameters,
)
from mindspeed_rlxf.weights.formats import COMMON, METADATA
from mindspeed_rlxf.weights.layout import ITERATION, MegatronLayout
from mindspeed_rlxf.weights.legacy import (
    RM_HEAD_BIAS,
    MakeShard,
    checkpoint_arguments,
    zero_bias,
)
from mindspeed_rlxf.weights.reader import spellings
from mindspeed_rlxf.weights.torch_dist import LAYER, global_name
from mindspeed_rlxf.weights.torch_file_writer import PlannedTensor

BACKEND = "metadata.json"
EXTRA_STATES = "__extra_0.distcp"


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
