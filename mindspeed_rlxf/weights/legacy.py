"""Megatron's checkpoints of one file per rank: `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import EMBEDDING, RM_HEAD, Head
from mindspeed_rlxf.weights.boxes import BoxedTensor
from mindspeed_rlxf.weights.layout import (
    ITERATION,
    RANK_FILE,
    RANK_FOLDER,
    MegatronLayout,
    layout_of,
)
from mindspeed_rlxf.weights.pickled import read_torch_file
from mindspeed_rlxf.weights.planned import MakeShard, PlannedFile, PlannedTensor
from mindspeed_rlxf.weights.reader import (
    RM_HEAD_BIAS,
    MegatronWeights,
    find,
    refuse,
    unknown_names,
)
from mindspeed_rlxf.weights.torch_file import write_torch_file

LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.")

Tensors = dict[str, BoxedTensor]
Grid = dict[tuple[int, int, int], list[Tensors]]
"""(tp, pp, ep) rank -> the tensors of each chunk of the model on it."""


def read_legacy(
    folder: Path, architecture: ArchitectureConfig, trust_files: bool = False
) -> MegatronWeights:
    """Open the weights of `folder`, which contains the folders of the ranks.

    The layout is found from the files. Raises ValueError when ranks are missing or damaged, or have
    another model.
    """
    grid = _read_ranks(folder, architecture, trust_files)
    layout = _find_layout(grid, folder, architecture)
    weights = MegatronWeights(folder, architecture)
    problems: list[str] = []
    for (tp_rank, pp_rank, ep_rank), chunks in grid.items():
        where = layout.rank_folder(tp_rank, pp_rank, ep_rank)
        for chunk, tensors in enumerate(chunks):
            used = set()
            for parameter in layout.parameters_of_any_head(architecture, pp_rank, chunk, ep_rank):
                found = find(parameter, tensors)
                problems += weights.add_shard(parameter, found, tp_rank, layout.tp, ep_rank)
                used.add(found[0] if found else "")
            extra = unknown_names(tensors, used)
            problems += [f"{where}: {name} is not in the model" for name in extra]
            if tp_rank == ep_rank == 0:
                weights.note_bias(tensors.get(RM_HEAD_BIAS))
    refuse(folder, problems)
    return weights


def _read_ranks(folder: Path, architecture: ArchitectureConfig, trust_files: bool) -> Grid:
    """Open the files of all ranks; return (tp, pp, ep) rank -> tensors of its chunks.

    A rank that a folder name lacks is 0. A name's only suffix is the pipeline rank, or the expert
    rank if each file holds a part of the experts. Raises ValueError when a rank is missing, or
    folder names have different numbers of parts. The folder has that of one rank at least.
    """
    matches = [(RANK_FOLDER.fullmatch(path.name), path) for path in sorted(folder.iterdir())]
    files = {
        match.groups(): _read_chunks(path / RANK_FILE, trust_files)
        for match, path in matches
        if match is not None
    }
    suffixes = {sum(part is not None for part in parts[1:]) for parts in files}
    if len(suffixes) != 1:
        raise ValueError(f"{folder} mixes checkpoints of different layouts; remove one of them")
    experts_only = suffixes == {1} and _counts_experts(files, architecture)
    grid: Grid = {}
    for (tp_rank, second, third), chunks in files.items():
        pp_rank, ep_rank = (None, second) if experts_only else (second, third)
        grid[int(tp_rank or 0), int(pp_rank or 0), int(ep_rank or 0)] = chunks
    sizes = [max(rank[axis] for rank in grid) + 1 for axis in range(3)]
    absent = (  # looked for no longer than it takes to name a few: a name may have any number
        f"tp {t} pp {p} ep {e}"
        for t in range(sizes[0])
        for p in range(sizes[1])
        for e in range(sizes[2])
        if (t, p, e) not in grid
    )
    if missing := list(islice(absent, 8)):
        raise ValueError(f"{folder} lacks ranks: {', '.join(missing)}; copy the whole folder")
    return grid


def _counts_experts(files: dict[Any, list[Tensors]], a: ArchitectureConfig) -> bool:
    """Whether the second number of folder names mp_rank_TT_NNN is the expert rank.

    If so, rank 1 has the embedding too; a pipeline rank 1 does not. False for a dense model and
    if no folder has the second number 1. files: numbers -> chunks
    """
    second = next((chunks for parts, chunks in files.items() if int(parts[1]) == 1), None)
    return a.num_experts is not None and second is not None and EMBEDDING.name in second[0]


def _read_chunks(file: Path, trust_files: bool) -> list[Tensors]:
    """Read a rank's file; return for each chunk its stored tensors by name, without other values.

    Chunks are the keys "model", or "model0", "model1", ... in the order of the numbers. Raises
    ValueError where the file has none, or one is no dict.
    """
    content = read_torch_file(file, trust_files)
    names = content if isinstance(content, dict) else {}
    keys = [k for k in names if type(k) is str and re.fullmatch(r"model\d{0,4}", k, re.ASCII)]
    if not keys or not all(isinstance(content[key], dict) for key in keys):
        raise ValueError(f"{file} holds no model; give the folder of a Megatron checkpoint")
    keys.sort(key=lambda key: int(key.removeprefix("model") or 0))
    return [
        {
            name: BoxedTensor.of(name, t.detach())
            for name, t in content[key].items()
            if type(name) is str and isinstance(t, torch.Tensor)
        }
        for key in keys
    ]


def _find_layout(grid: Grid, folder: Path, a: ArchitectureConfig) -> MegatronLayout:
    """Return the layout of the ranks, with the number of layers in each pipeline stage.

    The number is the largest layer index in tensor names of tp and ep rank 0, plus 1. Raises
    ValueError where ranks differ in their number of chunks, or the sum is not the model's.
    """
    tp, pp, ep = (max(rank[axis] for rank in grid) + 1 for axis in range(3))
    chunks = len(grid[0, 0, 0])
    if any(len(found) != chunks for found in grid.values()):
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
    """Yield the planned file of each rank, in the order of `layout.ranks`; nothing is written.

    A rank's file has arguments, version, iteration, and its chunks' models with their shards. A
    reward head gets a bias of zeros.
    dtype:  named in the arguments; each shard keeps its own
    folder: path that begins the paths of the files
    """
    for rank in layout.ranks():
        tp_rank, pp_rank, ep_rank = rank
        models: dict[str, OrderedDict[str, PlannedTensor]] = {}
        for chunk in range(layout.chunks):
            model = models[layout.model_key(chunk)] = OrderedDict()
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
        path = f"{folder}/{layout.rank_folder(*rank)}/{RANK_FILE}"
        yield PlannedFile(path, num_bytes, partial(write_torch_file, tree=tree))


def zero_bias(dtype: torch.dtype) -> PlannedTensor:
    """Return a planned zero bias for Megatron's reward head; the Hugging Face head has no bias."""
    return PlannedTensor((1,), dtype, lambda: torch.zeros(1, dtype=dtype))


def checkpoint_arguments(
    a: ArchitectureConfig, layout: MegatronLayout, dtype: torch.dtype
) -> Namespace:
    """Return the `args` of a checkpoint, which Megatron compares with its own or takes over."""
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
