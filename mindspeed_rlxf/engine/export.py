"""Write a role's weights to folders; each function is a collective over the role's ranks.

A folder is complete when all ranks have returned. If a rank cannot write, all ranks raise OSError
(see `save_sharded` for the exception).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rlxf.config.lora import linear_modules
from mindspeed_rlxf.engine.collective_errors import fail_together
from mindspeed_rlxf.engine.hf_stream import trained_tensors
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.engine.sharded_files import save_sharded
from mindspeed_rlxf.models.adapter_parameters import ADAPTERS
from mindspeed_rlxf.models.transformer import TransformerModel
from mindspeed_rlxf.weights.peft_folder import write_adapter
from mindspeed_rlxf.weights.stage_loader import StageWeights


def export_hf(
    weights: StageWeights, groups: ParallelGroups, folder: Path, load: str, described: Path
) -> None:
    """Write a Hugging Face folder, with adapters merged.

    Tensors get their dtypes in `load`; `described` has config.json and the tokenizer.
    """
    writes = groups.dp_cp.rank() < groups.ep.size() and groups.tp.rank() == 0  # each expert once
    error = weights.export(folder, Path(load), writes, described)
    with fail_together(folder):
        if error is not None:
            raise error


def export_adapters(
    weights: StageWeights, groups: ParallelGroups, chunks: int, folder: Path, load: str
) -> None:
    """Write the adapters, which belong to the weights in `load`, in PEFT's format.

    The first rank holds them all on the host. `chunks` counts those of a virtual pipeline.
    """
    writes, stream = dist.get_rank() == 0, trained_tensors(weights, groups, chunks)
    tensors = {name: tensor.cpu() for name, tensor in stream if writes}
    with fail_together(folder):
        if writes:
            linears = linear_modules(weights.architecture)
            write_adapter(folder, tensors, weights.lora, linears, weights.head, load)


def export_megatron(
    weights: StageWeights,
    chunks: Sequence[TransformerModel],
    folder: Path,
    describe: Callable[[Path], Any],
) -> None:
    """Write Megatron's distributed checkpoint, with adapters merged.

    `describe` writes config.json and the tokenizer into the folder, for conversion and for training
    from it.
    """
    writes = dist.get_rank() == 0
    with fail_together(folder):
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
    shards = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
    if weights.adapters:
        _merge_adapters(shards, weights)
    save_sharded(shards, folder)
    with fail_together(folder):
        if writes:
            describe(folder)


def _merge_adapters(shards: dict[str, dict[str, Any]], weights: StageWeights) -> None:
    """Replace adapted weights by merged copies on the host, and remove the adapters."""
    merged = {
        weights.tensors[parameter.name].data_ptr(): weights.merged_shard(parameter)
        for parameter in weights.table
        if weights.is_adapted(parameter)
    }
    for state in shards.values():
        for key in [key for key in state if f".{ADAPTERS}." in key]:
            del state[key]
        for each in state.values():
            data = getattr(each, "data", None)
            if isinstance(data, torch.Tensor) and data.data_ptr() in merged:
                each.data = merged[data.data_ptr()]
