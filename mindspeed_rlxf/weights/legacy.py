"""Megatron's checkpoints of one file per rank: `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.files.safe import locate_inside
from mindspeed_rlxf.models.parameters import (
    EMBEDDING,
    OUTPUT_LAYER,
    RM_HEAD,
    Head,
    Split,
    StageParameter,
    hf_shape,
    shard_slices,
)
from mindspeed_rlxf.weights.layout import (
    ITERATION,
    RANK_FILE,
    RANK_FOLDER,
    MegatronLayout,
    layout_of,
)
from mindspeed_rlxf.weights.reader import (
    IGNORED,
    MegatronWeights,
    find,
    is_optional,
    refuse,
)
from mindspeed_rlxf.weights.torch_file import StoredTensor, read_torch_file
from mindspeed_rlxf.weights.torch_file_writer import PlannedTensor, write_torch_file

RM_HEAD_BIAS = "rm_head.bias"
LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.")

Tensors = dict[str, StoredTensor]
Grid = dict[tuple[int, int, int], list[Tensors]]
"""(tp, pp, ep) rank -> the tensors of each chunk of the model on it."""

MakeShard = Callable[[StageParameter, int], PlannedTensor]
"""(parameter, tensor-parallel rank) -> that rank's part of it."""


def read_legacy(folder: Path, architecture: ArchitectureConfig) -> MegatronWeights:
    """The weights below `folder`, which holds the folders of the ranks.

    Errors: ValueError when ranks are missing or damaged, or hold another model.
    """
    grid = _grid(folder, architecture)
    layout = _layout(grid, folder, architecture)
    weights = MegatronWeights(folder, architecture)
    problems: list[str] = []
    for (tp_rank, pp_rank, ep_rank), chunks in grid.items():
        where = layout.rank_folder(tp_rank, pp_rank, ep_rank)
        for chunk, tensors in enumerate(chunks):
            # Of both heads: the checkpoint has one of them, and a role says which it needs.
            table = {
                p.name: p
                for head in Head
                for p in layout.parameters(architecture, head, pp_rank, chunk, ep_rank)
            }
            found = _add(weights, table.values(), tensors, tp_rank, ep_rank, layout, problems)
            extra = [n for n in tensors.keys() - found if not IGNORED.search(n)]
            problems += [f"{where}: {name} is not in the model" for name in sorted(extra)]
            bias = tensors.get(RM_HEAD_BIAS)
            if tp_rank == ep_rank == 0 and bias is not None and bias.shape == (1,):
                weights.dropped_bias = float(bias.read((0, 1)))
    refuse(folder, problems)
    return weights


def _add(
    weights: MegatronWeights,
    table: Any,
    tensors: Tensors,
    tp_rank: int,
    ep_rank: int,
    layout: MegatronLayout,
    problems: list[str],
) -> set[str]:
    """Take the pieces of one chunk; returns the names that were used."""
    a, used = weights.architecture, {RM_HEAD_BIAS, OUTPUT_LAYER.name}
    for parameter in table:
        found = find(parameter, tensors)
        if found is None:
            if not is_optional(parameter):
                problems.append(f"{parameter.name} is missing")
            continue
        name, stored = found
        used.add(name)
        again = parameter.split is Split.REPLICATED and tp_rank > 0
        again = again or (parameter.expert is None and ep_rank > 0)
        tied = parameter.name == OUTPUT_LAYER.name and parameter.sources == EMBEDDING.sources
        rows = sum(stored.shape[:1]) if parameter.split is Split.VOCAB else None
        if rows is not None and rows * layout.tp < a.vocab_size:
            problems.append(f"{name} has {rows * layout.tp} rows, the model needs {a.vocab_size}")
            continue
        parts = shard_slices(parameter, a, tp_rank, layout.tp, rows)
        expected = shard_shape(parameter, a, tp_rank, layout.tp, rows)
        if not stored.dtype.is_floating_point:
            problems.append(f"{name} is {stored.dtype}, the model needs floating-point numbers")
        elif stored.shape != expected:
            problems.append(f"{name} is {list(stored.shape)}, the model needs {list(expected)}")
        elif not again and not tied:
            weights.add(parts, stored)
    return used


def shard_shape(
    parameter: StageParameter,
    architecture: ArchitectureConfig,
    tp_rank: int,
    tp: int,
    vocab_rows: int | None = None,
) -> tuple[int, ...]:
    """Shape of a rank's part of a parameter, padding included."""
    parts = shard_slices(parameter, architecture, tp_rank, tp, vocab_rows)
    shape = list(hf_shape(parameter.sources[0], architecture))
    shape[parts[0].dim] = sum(part.size for part in parts)
    if parameter.split is Split.VOCAB and vocab_rows is not None:
        shape[0] = vocab_rows
    return tuple(shape)


def _grid(folder: Path, architecture: ArchitectureConfig) -> Grid:
    """The tensors of every rank. Errors: ValueError when one is missing."""
    matches = [(RANK_FOLDER.fullmatch(path.name), path) for path in sorted(folder.iterdir())]
    found = {m.groups(): f"{path.name}/{RANK_FILE}" for m, path in matches if m is not None}
    files = {parts: _chunks(locate_inside(folder, file, "")) for parts, file in found.items()}
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
    """Whether the only number after the tensor-parallel rank is that of the expert rank: then the
    second rank holds the embedding too."""
    second = next((chunks for parts, chunks in files.items() if int(parts[1]) == 1), None)
    return a.num_experts is not None and second is not None and EMBEDDING.name in second[0]


def _chunks(file: Path) -> list[Tensors]:
    content = read_torch_file(file)
    names = content if type(content) is dict else {}
    keys = [k for k in names if type(k) is str and re.fullmatch(r"model\d{0,4}", k, re.ASCII)]
    if not keys or not all(type(content[key]) is dict for key in keys):
        raise ValueError(f"{file} holds no model; give the folder of a Megatron checkpoint")
    keys.sort(key=lambda key: int(key.removeprefix("model") or 0))
    return [
        {
            name: t
            for name, t in content[key].items()
            if type(name) is str and name.isprintable() and type(t) is StoredTensor
        }
        for key in keys
    ]


def _layout(grid: Grid, folder: Path, a: ArchitectureConfig) -> MegatronLayout:
    """What the names of the layers say of the pipeline."""
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


@dataclass(frozen=True)
class LegacyFile:
    """One rank's file, to be written."""

    layout: MegatronLayout
    architecture: ArchitectureConfig
    head: Head
    rank: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def path(self) -> str:
        return f"{self.layout.rank_folder(*self.rank)}/{RANK_FILE}"

    def tree(self, shard: MakeShard) -> dict[str, Any]:
        """What Megatron finds in the file."""
        layout, (tp_rank, pp_rank, ep_rank) = self.layout, self.rank
        tree: dict[str, Any] = {
            "args": checkpoint_arguments(self.architecture, layout, self.dtype),
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
        }
        for chunk in range(layout.chunks):
            model: OrderedDict[str, PlannedTensor] = OrderedDict()
            for p in layout.parameters(self.architecture, self.head, pp_rank, chunk, ep_rank):
                model[p.name] = shard(p, tp_rank)
                if p.name == RM_HEAD.name:
                    model[RM_HEAD_BIAS] = zero_bias(model[p.name].dtype)
            tree[layout.model_key(chunk)] = model
        return tree

    def write(self, folder: Path, shard: MakeShard, wrote: Callable[[int], None]) -> None:
        write_torch_file(folder / self.path, self.tree(shard), wrote)

    def num_bytes(self, shard: MakeShard) -> int:
        models = (v for k, v in self.tree(shard).items() if k.startswith("model"))
        return sum(planned.num_bytes for model in models for planned in model.values())


def zero_bias(dtype: torch.dtype) -> PlannedTensor:
    """Of a reward head, which has none in Hugging Face."""
    return PlannedTensor((1,), dtype, lambda: torch.zeros(1, dtype=dtype))


def legacy_files(
    layout: MegatronLayout, architecture: ArchitectureConfig, head: Head, dtype: torch.dtype
) -> Iterator[LegacyFile]:
    """The files of all ranks."""
    for rank in layout.ranks():
        yield LegacyFile(layout, architecture, head, rank, dtype)


def checkpoint_arguments(
    a: ArchitectureConfig, layout: MegatronLayout, dtype: torch.dtype
) -> Namespace:
    """The arguments that Megatron compares with its own, or takes over (--use-checkpoint-args)."""
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


def padded(shard: Tensor, rows: int) -> Tensor:
    """A vocabulary shard with rows of zeros up to `rows`."""
    if shard.size(0) == rows:
        return shard
    result = torch.zeros(rows, *shard.shape[1:], dtype=shard.dtype)
    result[: shard.size(0)] = shard
    return result
