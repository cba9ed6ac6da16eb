"""Megatron checkpoints with a file per rank: `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`."""

import mmap
import os
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import EMBEDDING, RM_HEAD, Head
from mindspeed_rlxf.weights.chunks import (
    RM_HEAD_BIAS,
    MakeShard,
    PlannedFile,
    PlannedTensor,
    StoredTensor,
    StoredWeights,
    Wrote,
    add_rank,
    refuse,
)
from mindspeed_rlxf.weights.megatron_layout import (
    ITERATION,
    RANK_FILE,
    RANK_FOLDER,
    MegatronLayout,
    layout_of,
)
from mindspeed_rlxf.weights.pickled import read_torch_file

LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.")

Grid = dict[tuple[int, int, int], list[StoredWeights]]
"""(tp, pp, ep) rank -> the tensors of each chunk of the model on it."""


def read_legacy(
    folder: Path, architecture: ArchitectureConfig, trust_files: bool = False
) -> StoredWeights:
    """Open the weights in `folder`, which contains the rank folders.

    Raises:
        ValueError: missing or damaged ranks, or another model.
    """
    grid = _read_ranks(folder, architecture, trust_files)
    layout = _find_layout(grid, folder, architecture)
    weights: StoredWeights = {}
    problems: list[str] = []
    for (tp, pp, ep), chunks in grid.items():
        rank_folder = layout.rank_folder(tp, pp, ep)
        for chunk, tensors in enumerate(chunks):
            parameters = layout.parameters_of_any_head(architecture, pp, chunk, ep)
            chunk_problems = add_rank(
                weights, folder, architecture, parameters, tensors, tp, layout.tp, ep
            )
            problems += [f"{rank_folder}: {problem}" for problem in chunk_problems]
    refuse(folder, problems)
    return weights


def _read_ranks(folder: Path, architecture: ArchitectureConfig, trust_files: bool) -> Grid:
    """Open all rank files; return (tp, pp, ep) rank -> tensors per model chunk.

    A rank missing in a folder name is 0. A name's only suffix is the pipeline rank, or the expert
    rank if the files hold different experts.
    """
    chunks_of: dict[tuple[str, str | None, str | None], list[StoredWeights]] = {}
    for path in sorted(folder.iterdir()):
        match = RANK_FOLDER.fullmatch(path.name)
        if match is not None:
            chunks_of[match[1], match[2], match[3]] = _read_chunks(path / RANK_FILE, trust_files)
    num_suffixes = {(second is not None) + (third is not None) for _, second, third in chunks_of}
    if len(num_suffixes) != 1:
        raise ValueError(f"{folder} mixes checkpoints of different layouts; remove one of them")
    suffix_is_expert = False
    if num_suffixes == {1} and architecture.num_experts is not None:
        # Expert rank 1 has the embedding; pipeline rank 1 does not.
        for (_, second, _), chunks in chunks_of.items():
            if int(second or 0) == 1:
                suffix_is_expert = EMBEDDING.name in chunks[0]
                break
    grid: Grid = {}
    for (tp_rank, second, third), chunks in chunks_of.items():
        if suffix_is_expert:
            grid[int(tp_rank), 0, int(second or 0)] = chunks
        else:
            grid[int(tp_rank), int(second or 0), int(third or 0)] = chunks
    missing_ranks = list(islice(_missing_ranks(grid), 8))
    if missing_ranks:
        raise ValueError(f"{folder} lacks ranks: {', '.join(missing_ranks)}; copy the whole folder")
    return grid


def _missing_ranks(grid: Grid) -> Iterator[str]:
    """Yield the ranks that the grid lacks; take only a few, as a folder's name has any number."""
    tp, pp, ep = (max(rank[axis] for rank in grid) + 1 for axis in range(3))
    for tp_rank in range(tp):
        for pp_rank, ep_rank in product(range(pp), range(ep)):
            if (tp_rank, pp_rank, ep_rank) not in grid:
                yield f"tp {tp_rank} pp {pp_rank} ep {ep_rank}"


def _read_chunks(file: Path, trust_files: bool) -> list[StoredWeights]:
    content = read_torch_file(file, trust_files)
    keys = []
    if isinstance(content, dict):
        keys = [k for k in content if type(k) is str and re.fullmatch(r"model\d{0,4}", k, re.ASCII)]
    if not keys or not all(isinstance(content[key], dict) for key in keys):
        raise ValueError(f"{file} holds no model; give the folder of a Megatron checkpoint")
    keys.sort(key=lambda key: int(key.removeprefix("model") or 0))
    chunks = []
    for key in keys:
        chunk: StoredWeights = {}
        for name, tensor in content[key].items():
            if type(name) is str and isinstance(tensor, torch.Tensor):
                shape = tuple(tensor.shape)
                chunk[name] = StoredTensor.of(name, tensor.detach(), tensor.dtype, shape)
        chunks.append(chunk)
    return chunks


def _find_layout(grid: Grid, folder: Path, a: ArchitectureConfig) -> MegatronLayout:
    """Return the parallel layout, with the layer count per pipeline stage."""
    tp, pp, ep = (max(rank[axis] for rank in grid) + 1 for axis in range(3))
    chunks = len(grid[0, 0, 0])
    if any(len(rank_chunks) != chunks for rank_chunks in grid.values()):
        raise ValueError(f"{folder}: ranks differ in their chunks; copy the whole folder again")
    counts = []
    for chunk in range(chunks):
        for pp_rank in range(pp):
            layers = [LAYER.match(name) for name in grid[0, pp_rank, 0][chunk]]
            counts.append(1 + max((int(m.group(1)) for m in layers if m), default=-1))
    if sum(counts) != a.num_layers:
        refuse(folder, [f"it has {sum(counts)} layers, the model has {a.num_layers}"])
    return layout_of(counts, tp, pp, ep, 1)


def legacy_files(
    layout: MegatronLayout,
    architecture: ArchitectureConfig,
    head: Head,
    dtype: torch.dtype,
    shard: MakeShard,
    folder: str,
) -> Iterator[PlannedFile]:
    """Yield the planned file per rank, below `folder`; a reward head gets a zero bias.

    `dtype` goes into the stored arguments; shards keep their own.
    """
    ranks = product(range(layout.tp), range(layout.pp), range(layout.ep))
    for tp_rank, pp_rank, ep_rank in ranks:
        models: dict[str, OrderedDict[str, PlannedTensor]] = {}
        for chunk in range(layout.chunks):
            model: OrderedDict[str, PlannedTensor] = OrderedDict()
            models["model" if layout.chunks == 1 else f"model{chunk}"] = model
            for parameter in layout.parameters(architecture, head, pp_rank, chunk, ep_rank):
                model[parameter.name] = shard(parameter, tp_rank)
                if parameter.name == RM_HEAD.name:
                    model[RM_HEAD_BIAS] = zero_bias(model[parameter.name].dtype)
        tree = {
            "args": checkpoint_arguments(architecture, layout, dtype),
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
            **models,
        }
        num_bytes = sum(planned.num_bytes for m in models.values() for planned in m.values())
        path = f"{folder}/{layout.rank_folder(tp_rank, pp_rank, ep_rank)}/{RANK_FILE}"
        yield PlannedFile(path, num_bytes, partial(write_torch_file, tree=tree))


def zero_bias(dtype: torch.dtype) -> PlannedTensor:
    """Plan the zero bias in Megatron's reward head; the Hugging Face head has none."""
    return PlannedTensor((1,), dtype, lambda: torch.zeros(1, dtype=dtype))


def checkpoint_arguments(
    a: ArchitectureConfig, layout: MegatronLayout, dtype: torch.dtype
) -> Namespace:
    """Return the `args` that Megatron compares with its own or takes over."""
    return Namespace(
        num_layers=a.num_layers,
        hidden_size=a.hidden_size,
        ffn_hidden_size=a.ffn_hidden_size,
        num_attention_heads=a.num_attention_heads,
        group_query_attention=a.kv_heads != a.num_attention_heads,
        num_query_groups=a.kv_heads,
        kv_channels=a.head_dim,
        max_position_embeddings=a.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(a.rotary_base),
        normalization="RMSNorm",
        norm_epsilon=a.norm_epsilon,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=a.add_qkv_bias,
        qk_layernorm=a.qk_layernorm,
        untie_embeddings_and_output_weights=a.untie_embeddings_and_output_weights,
        num_experts=a.num_experts,
        moe_router_topk=a.moe_router_topk,
        moe_ffn_hidden_size=a.moe_ffn_hidden_size,
        vocab_size=a.vocab_size,
        padded_vocab_size=layout.vocab_rows(a) * layout.tp,
        make_vocab_size_divisible_by=layout.vocab_multiple,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        params_dtype=dtype,
        iteration=ITERATION,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        tokenizer_type=None,
    )


def write_torch_file(path: Path, tree: dict[str, Any], wrote: Wrote) -> None:
    """Write `tree` with `torch.save`, making its PlannedTensors one at a time.

    The file is first written without their data, then filled through a mapping.
    """
    fake = torch.serialization.skip_data(materialize_fake_tensors=True)
    with FakeTensorMode(), fake:  # type: ignore[no-untyped-call]
        empty = {
            key: OrderedDict((n, torch.empty(p.shape, dtype=p.dtype)) for n, p in model.items())
            for key, model in tree.items()
            if isinstance(model, dict)
        }
        torch.save({**tree, **empty}, path)
    with path.open("r+b") as file:
        # A mapping has no error for a full disk.
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            content = read_torch_file(path, trust_files=True)  # our own file
        for key, model in tree.items():
            for name, planned in model.items() if isinstance(model, dict) else ():
                content[key][name].copy_(planned.make())
                wrote(planned.num_bytes)
