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
    if found := find_unsupported(config):
        rule = f"must ask for a known model (field: possible, config.json): {'; '.join(found)}"
        raise UserError(Problem(f"{folder}/config.json", rule, remedy="use another model"))
    try:
        fields = {k: v for k, v in parse_architecture(config).items() if v is not None}
        return ArchitectureConfig(**fields), config
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, each['loc']))} {each['msg']}" for each in error.errors()]
        rule = f"must describe a model: {'; '.join(wrong)}"
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
    scored = "score.weight" in weights
    if scored and head is Head.LANGUAGE_MODEL:
        raise ValueError(f"{source} holds a reward model; add --orm")
    if not scored and head is Head.SCORE:
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
    c, groups = conversion, dict[str, dict[str, PlannedTensor]]()
    dtype = c.dtype or c.weights["model.norm.weight"].dtype  # named in Megatron's arguments
    model, folder_name = (c.architecture, c.head, dtype), f"iter_{ITERATION:07d}"
    if c.layout is None:
        groups = _hf_groups(c)
        files = [
            PlannedFile(
                path,
                sum(planned.num_bytes for planned in tensors.values()),
                partial(write_safetensors, tensors=tensors),
            )
            for path, tensors in groups.items()
        ]
    elif c.to is Format.LEGACY:
        shard = partial(_plan_shard, c, c.layout)
        files = list(legacy_files(c.layout, *model, shard, folder_name))
    else:  # whole tensors, padded as for all ranks of the layout
        flat = single_rank(c.architecture, c.layout.vocab_multiple * c.layout.tp)
        files = [plan_torch_dist(flat, *model, partial(_plan_shard, c, flat), folder_name)]
    done, total = 0, sum(file.num_bytes for file in files)

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    with new_folder(c.target, c.replace) as folder:
        free = shutil.disk_usage(folder).free
        if total + (1 << 20) > free:  # 1 MiB for everything beside the tensors
            rule = f"needs {total / 1e9:.2f} GB, its disk has {free / 1e9:.2f} GB free"
            remedy = "free some space or give a folder on another disk"
            raise UserError(Problem(f"{c.target}", rule, remedy=remedy))
        progress(0, total)
        for file in files:
            (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            file.write(folder / file.path, wrote=wrote)
        if c.layout is None:
            write_index(folder, {f: {n: t.num_bytes for n, t in groups[f].items()} for f in groups})
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
        named = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        rule, remedy = f"joins tensors of one dtype, not {named}", "choose one with --params-dtype"
        raise UserError(Problem(parameter.name, rule, remedy=remedy))
    dtype = c.dtype or dtypes[parameter.sources[0]]
    chunks = list(shard_chunks(parameter, a, tp_rank, layout.tp, rows))

    def make() -> Tensor:
        shard = torch.zeros(shape, dtype=dtype)
        for part in chunks:
            shard[part.place.slices] = c.weights[part.source].read(part.chunk)
        return shard

    return PlannedTensor(shape, dtype, make)


def _hf_groups(c: Conversion) -> dict[str, dict[str, PlannedTensor]]:
    """Plan the Hugging Face files: file name -> tensor name -> planned tensor."""
    groups: list[dict[str, PlannedTensor]] = [{}]
    held = 0

    def read(name: str, dtype: torch.dtype) -> Tensor:
        return c.weights[name].read(whole(c.weights[name].shape)).to(dtype)

    for name, shape in hf_shapes(c.architecture, c.head).items():
        dtype = c.dtype or c.weights[name].dtype
        planned = PlannedTensor(shape, dtype, partial(read, name, dtype))
        if groups[-1] and held + planned.num_bytes > c.shard_size:
            groups.append({})
            held = 0
        groups[-1][name] = planned
        held += planned.num_bytes
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
