"""Megatron's sharded checkpoints (`torch_dist`): global tensors in chunks, for any layout.

Equally named layers (and experts) form one tensor with an additional axis. `.metadata` lists the
chunks and their places in the `.distcp` files, each in `torch.save` format.
"""

import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import RM_HEAD, Head
from mindspeed_rlxf.weights.chunks import (
    RM_HEAD_BIAS,
    Chunk,
    MakeShard,
    PlannedFile,
    PlannedTensor,
    Shape,
    StoredTensor,
    StoredWeights,
    Wrote,
    add_rank,
    refuse,
    spellings,
    whole,
)
from mindspeed_rlxf.weights.formats import COMMON, METADATA
from mindspeed_rlxf.weights.legacy import LAYER, checkpoint_arguments, zero_bias
from mindspeed_rlxf.weights.megatron_layout import ITERATION, MegatronLayout, single_rank
from mindspeed_rlxf.weights.pickled import load_pickled, read_metadata

EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
LINEAR = re.compile(r"\.linear_\w+\.weight$")

Place = tuple[str, int, int]
"""File, offset and length (bytes) of a stored tensor, which is a file of torch.save in itself."""


def read_metadata_tensors(folder: Path, trust_files: bool = False) -> StoredWeights:
    """Read a sharded checkpoint's `.metadata`; return its tensors by name.

    Raises:
        ValueError: it is damaged, or a file is missing or truncated.
    """
    content = read_metadata(folder / METADATA)

    @lru_cache(maxsize=1)  # several chunks are read from one stored tensor
    def load(file: str, offset: int, length: int) -> Any:
        with (folder / file).open("rb") as stream:
            stream.seek(offset)
            data = io.BytesIO(stream.read(length))
        return load_pickled(data, folder / file, trust_files)

    def read(place: Place, shape: Shape, dtype: torch.dtype, chunk: Chunk) -> Tensor:
        stored = load(*place)
        if not isinstance(stored, Tensor) or (stored.shape, stored.dtype) != (shape, dtype):
            rule = f"{folder / place[0]}: no tensor of shape {list(shape)} where {METADATA} has one"
            raise ValueError(f"{rule}; copy the folder again")
        return stored[chunk.slices].clone()

    tensors: StoredWeights = {}
    try:
        places = dict(map(_read_place, content.state["storage_data"].items()))
        for name, entry in content.state["state_dict_metadata"].items():
            if type(entry).__name__ == "TensorStorageMetadata":
                properties = entry.state["properties"].state
                dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
                size = tuple(entry.state["size"])
                stored = StoredTensor(f"{name} of {folder}", dtype, size, [])
                for metadata in entry.state["chunks"]:
                    chunk = Chunk(tuple(metadata.state["offsets"]), tuple(metadata.state["sizes"]))
                    reader = partial(read, places[name, chunk.starts], chunk.shape, dtype)
                    stored.chunks.append((chunk, whole(chunk.shape), reader))
                tensors[name] = stored
    except (AttributeError, TypeError, KeyError, ValueError, IndexError) as error:
        raise ValueError(
            f"{folder / METADATA} is not as torch.distributed.checkpoint writes it "
            f"({error!r:.200}); copy the folder again"
        ) from None
    size_of = cache(lambda path: path.stat().st_size if path.is_file() else 0)
    for file, offset, length in places.values():
        if size_of(folder / file) < offset + length:
            rule = (
                f"{folder / file} is missing or truncated: {size_of(folder / file)} bytes are there"
            )
            raise ValueError(f"{rule}; copy it again")
    return tensors


def _read_place(entry: tuple[Any, Any]) -> tuple[tuple[str, Shape], Place]:
    """Return ((tensor name, first element), place) for an entry."""
    index = entry[0].state
    info = entry[1].state
    if info.get("transform_descriptors"):
        raise ValueError("compressed entries are not read")
    file = info["relative_path"]
    offset = info["offset"]
    length = info["length"]
    if Path(file).name != file or min(offset, length) < 0:
        raise ValueError(f"no place: {file!r:.80}, {offset}, {length}")
    first_element = tuple(index.get("offset") or ())
    return (index["fqn"], first_element), (file, offset, length)


def read_torch_dist(
    folder: Path, tensors: StoredWeights, architecture: ArchitectureConfig, prefix: str = ""
) -> StoredWeights:
    """Return the weights among a checkpoint's `tensors`, or an optimizer state by `prefix`.

    Raises ValueError for another model.
    """
    unstacked: StoredWeights = {}
    for name, stored in tensors.items():
        is_chosen = name.startswith(prefix) if prefix else "optimizer" not in name
        if is_chosen:
            unstacked.update(_unstack(name.removeprefix(prefix), stored, architecture))
    weights: StoredWeights = {}
    parameters = single_rank(architecture).parameters_of_any_head(architecture, 0, 0, 0)
    refuse(folder, add_rank(weights, folder, architecture, parameters, unstacked))
    return weights


def _unstack(
    name: str, stored: StoredTensor, a: ArchitectureConfig
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensor per layer (and expert) from a stacked one, by unstacked name.

    One layer too many is enough to refuse the checkpoint.
    """
    if not name.startswith("decoder.layers.") or LAYER.match(name):
        yield name, stored
        return
    limits = [a.num_layers]
    if ".experts.experts." in name:
        limits.append(a.num_experts or 0)
    counts = [min(size, limit + 1) for size, limit in zip(stored.size, limits, strict=False)]
    for index in product(*map(range, counts)):
        unstacked = name.replace("layers.", f"layers.{index[0]}.", 1)
        for expert in index[1:]:
            unstacked = unstacked.replace(".experts.experts.", f".experts.local_experts.{expert}.")
        yield unstacked, replace(stored, index=index)


def _stacked(name: str, expert: int | None) -> tuple[str, Shape]:
    """Return (stacked tensor name, parameter's index in it).

    The index is (layer,), with an expert (layer, expert), outside layers ().
    """
    layer = LAYER.match(name)
    if layer is None:
        return name, ()
    index: Shape = (int(layer.group(1)),)
    if expert is not None:
        index += (expert,)
    key = EXPERT.sub(".experts.", LAYER.sub("decoder.layers.", name))
    return spellings(key)[-1], index


class _Planner(DefaultSavePlanner):
    """Makes each chunk when the writer reaches it, and frees the previous one."""

    def __init__(self, makers: dict[MetadataIndex, Callable[[], Tensor]]) -> None:
        super().__init__()
        self.makers = makers
        self.previous = torch.empty(0)

    def resolve_data(self, write_item: WriteItem) -> Any:
        # Older versions of torch keep what they saved until the garbage collector comes.
        self.previous.untyped_storage().resize_(0)
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save([None], stream)
            return stream
        self.previous = self.makers[write_item.index]()
        return self.previous


def plan_torch_dist(
    layout: MegatronLayout,
    a: ArchitectureConfig,
    head: Head,
    dtype: torch.dtype,
    shard: MakeShard,
    folder: str,
) -> PlannedFile:
    """Plan a checkpoint folder loadable in any layout; a reward head gets a zero bias.

    `layout` has one rank. `dtype` goes into the stored arguments; tensors keep their own.
    """
    items: list[WriteItem] = []
    planned: dict[MetadataIndex, PlannedTensor] = {}

    def add(name: str, index: Shape, sizes: Shape, tensor: PlannedTensor) -> None:
        starts = torch.Size(index + (0,) * len(tensor.shape))
        shape = (1,) * len(index) + tensor.shape
        key = MetadataIndex(name, starts)
        tensor_data = TensorWriteData(
            chunk=ChunkStorageMetadata(starts, torch.Size(shape)),
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(sizes + tensor.shape),
        )
        items.append(WriteItem(index=key, type=WriteItemType.SHARD, tensor_data=tensor_data))
        planned[key] = PlannedTensor(shape, tensor.dtype, lambda: tensor.make().view(shape))

    for parameter in layout.parameters(a, head, 0, 0, 0):
        name, index = _stacked(parameter.name, parameter.expert)
        sizes = (a.num_layers, a.num_experts or 0)[: len(index)]
        tensor = shard(parameter, 0)
        add(name, index, sizes, tensor)
        if parameter.name == RM_HEAD.name:
            add(RM_HEAD_BIAS, (), (), zero_bias(tensor.dtype))
        if LINEAR.search(name):  # Megatron's linear layers have an empty extra state each
            shard_number = f"{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"
            key = MetadataIndex(f"{name.removesuffix('weight')}_extra_state/shard_{shard_number}")
            items.append(WriteItem(index=key, type=WriteItemType.BYTE_IO))

    def write(path: Path, wrote: Wrote) -> None:
        def make(tensor: PlannedTensor) -> Tensor:
            wrote(tensor.num_bytes)
            return tensor.make()

        planner = _Planner({key: partial(make, tensor) for key, tensor in planned.items()})
        # Without looking for a device, of which its loader would make use.
        writer = FileSystemWriter(path, per_thread_copy_ahead=0)
        plans, metadata = create_default_global_save_plan([SavePlan(items)])
        metadata.planner_data = {}  # older versions of torch read it without checking it exists
        writer.set_up_storage_writer(True)
        (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(plans[0])])
        writer.finish(metadata, [writer.write_data(plan, planner).wait()])
        common = {
            "args": checkpoint_arguments(a, layout, dtype),
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
        }
        torch.save(common, path / COMMON)
        backends = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        (path / "metadata.json").write_text(json.dumps(backends), encoding="utf-8")

    return PlannedFile(folder, sum(tensor.num_bytes for tensor in planned.values()), write)
