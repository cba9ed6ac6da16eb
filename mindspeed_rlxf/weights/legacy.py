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
        for chunk, tensors in enumerate(chunks):
            parameters = layout.parameters_of_any_head(architecture, pp, chunk, ep)
            ranks = tp, layout.tp, ep
            found = add_rank(weights, folder, architecture, parameters, tensors, *ranks)
            problems += [f"{layout.rank_folder(tp, pp, ep)}: {problem}" for problem in found]
    refuse(folder, problems)
    return weights


def _read_ranks(folder: Path, architecture: ArchitectureConfig, trust_files: bool) -> Grid:
    """Open all rank files; return (tp, pp, ep) rank -> tensors per model chunk.

    A rank missing in a folder name is 0. A name's only suffix is the pipeline rank, or the expert
    rank if the files hold different experts.
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
    experts_only = False
    if suffixes == {1} and architecture.num_experts is not None:
        # Expert rank 1 has the embedding; pipeline rank 1 does not.
        first = next((chunks for parts, chunks in files.items() if int(parts[1]) == 1), None)
        experts_only = first is not None and EMBEDDING.name in first[0]
    grid: Grid = {}
    for (tp_rank, second, third), chunks in files.items():
        pp_rank, ep_rank = (None, second) if experts_only else (second, third)
        grid[int(tp_rank or 0), int(pp_rank or 0), int(ep_rank or 0)] = chunks
    sizes = [max(rank[axis] for rank in grid) + 1 for axis in range(3)]
    absent = (  # looked for no longer than it takes to list a few: a name may have any number
        f"tp {t} pp {p} ep {e}"
        for t in range(sizes[0])
        for p, e in product(range(sizes[1]), range(sizes[2]))
        if (t, p, e) not in grid
    )
    if missing := list(islice(absent, 8)):
        raise ValueError(f"{folder} lacks ranks: {', '.join(missing)}; copy the whole folder")
    return grid


def _read_chunks(file: Path, trust_files: bool) -> list[StoredWeights]:
    content = read_torch_file(file, trust_files)
    names = content if isinstance(content, dict) else {}
    keys = [k for k in names if type(k) is str and re.fullmatch(r"model\d{0,4}", k, re.ASCII)]
    if not keys or not all(isinstance(content[key], dict) for key in keys):
        raise ValueError(f"{file} holds no model; give the folder of a Megatron checkpoint")
    keys.sort(key=lambda key: int(key.removeprefix("model") or 0))
    return [
        {
            name: StoredTensor.of(name, t.detach(), t.dtype, tuple(t.shape))
            for name, t in content[key].items()
            if type(name) is str and isinstance(t, torch.Tensor)
        }
        for key in keys
    ]


def _find_layout(grid: Grid, folder: Path, a: ArchitectureConfig) -> MegatronLayout:
    """Return the parallel layout, with the layer count per pipeline stage."""
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
