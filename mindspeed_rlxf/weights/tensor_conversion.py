"""Convert weights between Hugging Face and Megatron folders, one tensor at a time."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from mindspeed_rlxf.config.hf_config import find_unsupported, parse_architecture, read_hf_config
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import Head, Split, StageParameter, hf_shapes, shard_shape
from mindspeed_rlxf.weights.atomic import sync_folder as sync  # of a file too
from mindspeed_rlxf.weights.chunks import (
    PlannedFile,
    PlannedTensor,
    StoredWeights,
    refuse,
    shard_chunks,
    whole,
)
from mindspeed_rlxf.weights.folders import copy_side_files, open_weights
from mindspeed_rlxf.weights.formats import Format
from mindspeed_rlxf.weights.hf_folder import (
    hf_file_name,
    write_index,
    write_safetensors,
)
from mindspeed_rlxf.weights.legacy import legacy_files
from mindspeed_rlxf.weights.megatron_layout import ITERATION, TRACKER, MegatronLayout, single_rank
from mindspeed_rlxf.weights.tensor_checks import tensor_problems, tied_names
from mindspeed_rlxf.weights.torch_dist import plan_torch_dist

MARKER = ".converted.json"  # in folders that `convert` wrote

DTYPE_NAMES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Progress = Callable[[int, int], None]
"""Called with (bytes written so far, bytes in all)."""


@dataclass(frozen=True)
class Conversion:
    """A conversion with checked arguments, from `conversion.plan_conversion`."""

    config: Path  # folder of config.json and the tokenizer
    target: Path  # folder to write
    to: Format
    architecture: ArchitectureConfig
    head: Head
    weights: StoredWeights
    layout: MegatronLayout | None  # of a Megatron target
    dtype: torch.dtype | None  # of the target, None = each tensor keeps its own
    shard_size: int  # most bytes of a Hugging Face file, unless a single tensor is larger
    replace: bool  # an existing target

    @property
    def shares_groups(self) -> bool:
        """Whether a legacy target has more tensor-parallel ranks than KV heads."""
        ranks = self.layout.tp if self.layout and self.to is Format.LEGACY else 1
        return ranks > self.architecture.kv_heads


def read_architecture(folder: Path) -> tuple[ArchitectureConfig, dict[str, Any]]:
    """Read a folder's config.json; return (architecture, file content).

    Raises:
        ValueError: it is unreadable, invalid, or describes an unsupported model.
    """
    config = read_hf_config(folder)
    unsupported = find_unsupported(config)
    if unsupported:
        listed = "; ".join(unsupported)
        rule = f"must ask for a known model (field: possible, config.json): {listed}"
        raise UserError(Problem(f"{folder}/config.json", rule, remedy="use another model"))
    fields = {name: v for name, v in parse_architecture(config).items() if v is not None}
    try:
        return ArchitectureConfig(**fields), config
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            field = ".".join(map(str, fault["loc"]))
            faults.append(f"{field} {fault['msg']}")
        rule = f"must describe a model: {'; '.join(faults)}"
        raise UserError(Problem(f"{folder}/config.json", rule, remedy="correct it")) from None


def choose_head(config: dict[str, Any], orm: bool) -> Head:
    """Return a score head if --orm (`orm`) or config.json says so, else a language-model head."""
    name = str((config.get("architectures") or [""])[0])
    is_scorer = orm or name.endswith("ForSequenceClassification")
    return Head.SCORE if is_scorer else Head.LANGUAGE_MODEL


def open_source(
    source: Path, architecture: ArchitectureConfig, head: Head, trust_files: bool = False
) -> StoredWeights:
    """Open the weights to convert. Raises ValueError unless they are exactly the model's."""
    weights = open_weights(source, architecture, trust_files)
    expected = hf_shapes(architecture, head)
    has_score_head = "score.weight" in weights
    if has_score_head and head is Head.LANGUAGE_MODEL:
        raise ValueError(f"{source} holds a reward model; add --orm")
    if not has_score_head and head is Head.SCORE:
        raise ValueError(f"{source} holds no score head; leave --orm out")
    tied = tied_names(architecture, head)
    refuse(source, tensor_problems(source, weights, expected, head, tied))
    return weights


def convert(conversion: Conversion, progress: Progress) -> None:
    """Write the target folder, which appears under its name once complete.

    Calls `progress` with (bytes done, total bytes) first and after each tensor.

    Raises:
        ValueError: the target exists (unless replaceable), the disk is too small, tensors to be
            joined differ in dtype, or the source is damaged.
        OSError: an unreadable file, or a failed write.
    """
    c = conversion
    dtype = c.dtype or c.weights["model.norm.weight"].dtype  # named in Megatron's arguments
    model = (c.architecture, c.head, dtype)
    folder_name = f"iter_{ITERATION:07d}"
    hf_sizes: dict[str, dict[str, int]] = {}  # file -> tensor -> bytes
    if c.layout is None:
        files = []
        for path, tensors in _hf_groups(c).items():
            hf_sizes[path] = {name: tensor.num_bytes for name, tensor in tensors.items()}
            write = partial(write_safetensors, tensors=tensors)
            files.append(PlannedFile(path, sum(hf_sizes[path].values()), write))
    elif c.to is Format.LEGACY:
        shard = partial(_plan_shard, c, c.layout)
        files = list(legacy_files(c.layout, *model, shard, folder_name))
    else:  # whole tensors, padded as for all ranks of the layout
        flat = single_rank(c.architecture, c.layout.vocab_multiple * c.layout.tp)
        files = [plan_torch_dist(flat, *model, partial(_plan_shard, c, flat), folder_name)]
    num_written_bytes = 0
    num_bytes = sum(file.num_bytes for file in files)

    def wrote(count: int) -> None:
        nonlocal num_written_bytes
        num_written_bytes += count
        progress(num_written_bytes, num_bytes)

    with new_folder(c.target, c.replace) as folder:
        num_free_bytes = shutil.disk_usage(folder).free
        if num_bytes + (1 << 20) > num_free_bytes:  # 1 MiB for everything beside the tensors
            rule = (
                f"needs {num_bytes / 1e9:.2f} GB, its disk has {num_free_bytes / 1e9:.2f} GB free"
            )
            remedy = "free some space or give a folder on another disk"
            raise UserError(Problem(f"{c.target}", rule, remedy=remedy))
        progress(0, num_bytes)
        for file in files:
            (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            file.write(folder / file.path, wrote=wrote)
        if c.layout is None:
            write_index(folder, hf_sizes)
        else:
            (folder / TRACKER).write_text(str(ITERATION), encoding="utf-8")
        copy_side_files(c.config, folder, c.head, c.dtype)


def _plan_shard(
    c: Conversion, layout: MegatronLayout, parameter: StageParameter, tp_rank: int
) -> PlannedTensor:
    """Plan a tensor-parallel rank's shard, with zero padding.

    Uses the conversion's dtype, else the sources'; UserError if these differ.
    """
    a = c.architecture
    rows = layout.vocab_rows(a) if parameter.split is Split.VOCAB else None
    shape = shard_shape(parameter, a, layout.tp, rows)
    dtypes = {source: c.weights[source].dtype for source in parameter.sources}
    if c.dtype is None and len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        rule = f"joins tensors of one dtype, not {listed}"
        remedy = "choose one with --params-dtype"
        raise UserError(Problem(parameter.name, rule, remedy=remedy))
    dtype = c.dtype or dtypes[parameter.sources[0]]
    chunks = list(shard_chunks(parameter, a, tp_rank, layout.tp, rows))

    def make() -> Tensor:
        shard = torch.zeros(shape, dtype=dtype)
        for shard_chunk in chunks:
            elements = c.weights[shard_chunk.source].read(shard_chunk.chunk)
            shard[shard_chunk.place.slices] = elements
        return shard

    return PlannedTensor(shape, dtype, make)


def _hf_groups(c: Conversion) -> dict[str, dict[str, PlannedTensor]]:
    """Plan the Hugging Face files: file name -> tensor name -> planned tensor."""
    groups: list[dict[str, PlannedTensor]] = [{}]
    num_bytes = 0  # of the last group

    def read(name: str, dtype: torch.dtype) -> Tensor:
        return c.weights[name].read(whole(c.weights[name].shape)).to(dtype)

    for name, shape in hf_shapes(c.architecture, c.head).items():
        dtype = c.dtype or c.weights[name].dtype
        planned = PlannedTensor(shape, dtype, partial(read, name, dtype))
        if groups[-1] and num_bytes + planned.num_bytes > c.shard_size:
            groups.append({})
            num_bytes = 0
        groups[-1][name] = planned
        num_bytes += planned.num_bytes
    return {hf_file_name(i, len(groups)): tensors for i, tensors in enumerate(groups)}


@contextmanager
def new_folder(target: Path, replace: bool) -> Iterator[Path]:
    """Yield the empty folder `TARGET.partial`; rename it to `target` after the block.

    Removes it if the block raises, one left by an interrupted call, and with `replace` an older
    target. Raises UserError if the target exists without `replace`, or an old folder has no MARKER.
    """
    partial = target.with_name(f"{target.name}.partial")
    for folder in (target, partial):
        is_empty = folder.is_dir() and not any(folder.iterdir())
        if is_empty or not os.path.lexists(folder):
            continue
        if folder is target and not replace:
            remedy = "give another folder, or --force"
            raise UserError(Problem(f"{target}", "must not exist yet", remedy=remedy))
        if folder.is_symlink() or not (folder / MARKER).is_file():
            remedy = "give another folder, or remove it yourself"
            raise UserError(Problem(f"{folder}", "was not written by convert", remedy=remedy))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / MARKER).write_text('{"written_by": "convert"}\n')
        yield partial
        for path in (*partial.rglob("*"), partial):
            sync(path)
        if replace:
            shutil.rmtree(target, ignore_errors=True)
        os.rename(partial, target)  # fails where a folder of that name has appeared
        sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
