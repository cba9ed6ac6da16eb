"""Conversion of weights between Hugging Face and Megatron folders, one tensor at a time."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.hf_config import find_unsupported, parse_architecture, read_hf_config
from mindspeed_rlxf.config.pydantic_errors import problems_of
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    Head,
    Split,
    StageParameter,
    hf_shapes,
    shard_shape,
)
from mindspeed_rlxf.weights.boxes import BoxedWeights, shard_boxes, whole
from mindspeed_rlxf.weights.folders import (
    CONFIG,
    SIDE_FILES,
    check_side_files,
    copy_side_files,
    is_scorer,
    open_weights,
)
from mindspeed_rlxf.weights.formats import COMMON, INDEX, METADATA, Format
from mindspeed_rlxf.weights.hf_folder import hf_file_name, shape_problems, write_index
from mindspeed_rlxf.weights.layout import ITERATION, TRACKER, MegatronLayout
from mindspeed_rlxf.weights.legacy import legacy_files
from mindspeed_rlxf.weights.planned import PlannedFile, PlannedTensor
from mindspeed_rlxf.weights.publish import new_folder
from mindspeed_rlxf.weights.reader import refuse, unknown_names
from mindspeed_rlxf.weights.safetensors_file import write_safetensors
from mindspeed_rlxf.weights.torch_dist import BACKEND, EXTRA_STATES, dist_files, write_metadata

ITERATION_FOLDER = f"iter_{ITERATION:07d}"
SPARE_BYTES = 1 << 20  # for everything beside the tensors

DTYPE_NAMES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Progress = Callable[[int, int], None]
"""Called with (bytes written so far, bytes in all)."""


@dataclass(frozen=True)
class Conversion:
    """A conversion whose arguments are checked; `conversion.plan_conversion` makes it.

    config:     folder of config.json and the tokenizer
    target:     folder to write
    layout:     of a Megatron target, None for Hugging Face
    dtype:      of the target, None = each tensor keeps its own
    shard_size: largest number of tensor bytes in one file of a Hugging Face target, unless a single
                tensor is larger
    replace:    replace an existing target
    """

    source: Path
    config: Path
    target: Path
    to: Format
    architecture: ArchitectureConfig
    head: Head
    weights: BoxedWeights
    layout: MegatronLayout | None
    dtype: torch.dtype | None
    shard_size: int
    replace: bool

    @property
    def shares_groups(self) -> bool:
        """Whether a legacy target has more tensor-parallel ranks than query groups (KV heads).

        False for targets of other formats.
        """
        ranks = self.layout.tp if self.layout and self.to is Format.LEGACY else 1
        return ranks > self.architecture.kv_heads


def read_architecture(folder: Path) -> tuple[ArchitectureConfig, dict[str, Any]]:
    """Read a folder's config.json; return (architecture, content of the file).

    Raises UserError when it is missing or invalid or describes an unsupported model, and when it or
    one of SIDE_FILES cannot be read, is no regular file or links out of the folder.
    """
    file = f"{folder}/config.json"
    try:
        check_side_files(folder)
        config = read_hf_config(folder)
        if found := find_unsupported(config):
            rule = "must ask for a known model (field: possible, config.json)"
            raise UserError(
                Problem(file, f"{rule}: {'; '.join(found)}", remedy="use another model")
            )
        fields = {k: v for k, v in parse_architecture(config).items() if v is not None}
        return ArchitectureConfig(**fields), config
    except ValidationError as error:
        wrong = "; ".join(map(str, problems_of(error)))
        raise UserError(
            Problem(file, f"must describe a model: {wrong}", remedy="correct it")
        ) from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(Problem("", str(error))) from None


def choose_head(config: dict[str, Any], orm: bool) -> Head:
    """Return a score head if `orm` (--orm) or config.json says so, else a language-model head."""
    return Head.SCORE if orm or is_scorer(config) else Head.LANGUAGE_MODEL


def open_source(
    source: Path, architecture: ArchitectureConfig, head: Head, trust_files: bool = False
) -> BoxedWeights:
    """Open the weights to convert. Raises UserError unless they are exactly those of the model.

    That is, for damage, names missing or unknown (an output layer may be there without use),
    another shape, and a score head that `head` does not ask for, or the reverse.
    """
    try:
        weights = open_weights(source, architecture, trust_files)
        expected = hf_shapes(architecture, head)
        scored = "score.weight" in weights
        if scored and head is Head.LANGUAGE_MODEL:
            raise ValueError(f"{source} holds a reward model; add --orm")
        if not scored and head is Head.SCORE:
            raise ValueError(f"{source} holds no score head; leave --orm out")
        refuse(source, shape_problems(weights, expected))
        # An output layer that is tied, or that a scorer does not use, is not lost.
        lost = unknown_names(weights.names(), {*expected, "lm_head.weight"})
        refuse(source, [f"{name} is not in the model" for name in lost])
    except ValueError as error:
        raise UserError(Problem("", str(error))) from None
    return weights


def convert(conversion: Conversion, progress: Progress) -> None:
    """Write the target folder, which appears under its name once complete.

    progress: called with (bytes done, bytes in all) before the first file and after each tensor
    Raises UserError when the target exists (unless it may be replaced), another process writes it,
    the disk is too small, tensors to be joined differ in dtype, the source is damaged, or a file
    cannot be read or written; DiskFull when the disk or the quota is full.
    """
    c = conversion
    files = _plan_files(c)
    done, total = 0, sum(file.num_bytes for file in files)

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    inside = (f"{ITERATION_FOLDER}/{name}" for name in (METADATA, COMMON, BACKEND, EXTRA_STATES))
    names = [*(file.path for file in files), CONFIG, *SIDE_FILES, INDEX, TRACKER, *inside]
    try:
        with new_folder(c.target, names, c.replace) as folder:
            _check_space(c, total)
            progress(0, total)
            notes: dict[str, Any] = {}
            for file in files:
                (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
                notes[Path(file.path).name] = file.write(folder / file.path, wrote=wrote)
            _write_beside(c, notes, folder)
    except UserError:
        raise
    except ValueError as error:  # damage of the source that shows when its bytes are read
        raise UserError(Problem("", str(error))) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            rule = f"cannot be read or written ({error.strerror})"
            remedy = "correct that and run the same command again"
            raise UserError(Problem(f"{error.filename or c.target}", rule, remedy=remedy)) from None
        raise DiskFull(
            f"the disk of {c.target} is full; free some space and run the same command again"
        ) from None


class DiskFull(Exception):
    """The disk filled up while files were written."""


def _plan_shard(c: Conversion, parameter: StageParameter, tp_rank: int) -> PlannedTensor:
    """Plan a tensor-parallel rank's shard of a parameter, whose padding is 0.

    Its dtype is the conversion's, or else that of its sources; raises UserError if these differ.
    """
    a, layout = c.architecture, c.layout
    assert layout is not None, "only Megatron parameters have shards"
    rows = layout.vocab_rows(a) if parameter.split is Split.VOCAB else None
    shape = shard_shape(parameter, a, layout.tp, rows)
    dtype = c.dtype or _common_dtype(c, parameter)
    boxes = list(shard_boxes(parameter, a, tp_rank, layout.tp, rows))

    def make() -> Tensor:
        shard = torch.zeros(shape, dtype=dtype)
        for part in boxes:
            shard[part.place.slices] = c.weights.read(part.source, part.box)
        return shard

    return PlannedTensor(shape, dtype, make)


def _common_dtype(c: Conversion, parameter: StageParameter) -> torch.dtype:
    """Return the dtype of the tensors that Megatron joins into a parameter.

    Raises UserError where they differ.
    """
    dtypes = {source: c.weights.dtype(source) for source in parameter.sources}
    if len(set(dtypes.values())) > 1:
        named = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise UserError(
            Problem(
                parameter.name,
                f"joins tensors of one dtype, not {named}",
                remedy="choose one with --params-dtype",
            )
        )
    return next(iter(dtypes.values()))


def _plan_files(c: Conversion) -> list[PlannedFile]:
    """Plan the files of the target that hold tensors, by its format; no tensor is read or written.

    Raises UserError as `_plan_shard`.
    """
    if c.to is Format.HF:
        return list(_hf_files(c))
    assert c.layout is not None, "a Megatron target has a layout"
    model, shard = (c.layout, c.architecture, c.head), partial(_plan_shard, c)
    if c.to is Format.LEGACY:
        return list(legacy_files(*model, _model_dtype(c), shard, ITERATION_FOLDER))
    return list(dist_files(*model, shard, ITERATION_FOLDER))


def _model_dtype(c: Conversion) -> torch.dtype:
    return c.dtype or c.weights.dtype("model.norm.weight")


def _hf_groups(c: Conversion) -> dict[str, dict[str, PlannedTensor]]:
    """Plan the tensors of a Hugging Face checkpoint: file name -> tensor name -> planned tensor.

    In the order of `hf_shapes`, a new file starts before a tensor that would make the file larger
    than `shard_size` bytes; a larger tensor gets a file of its own.
    """
    groups: list[dict[str, PlannedTensor]] = [{}]
    held = 0
    for name, shape in hf_shapes(c.architecture, c.head).items():
        planned = _plan_tensor(c, name, shape)
        if groups[-1] and held + planned.num_bytes > c.shard_size:
            groups.append({})
            held = 0
        groups[-1][name] = planned
        held += planned.num_bytes
    return {hf_file_name(i, len(groups)): tensors for i, tensors in enumerate(groups)}


def _hf_files(c: Conversion) -> Iterator[PlannedFile]:
    for path, tensors in _hf_groups(c).items():
        num_bytes = sum(planned.num_bytes for planned in tensors.values())
        yield PlannedFile(path, num_bytes, partial(write_safetensors, tensors=tensors))


def _plan_tensor(c: Conversion, name: str, shape: tuple[int, ...]) -> PlannedTensor:
    dtype = c.dtype or c.weights.dtype(name)
    return PlannedTensor(shape, dtype, lambda: c.weights.read(name, whole(shape)).to(dtype))


def _write_beside(c: Conversion, notes: dict[str, Any], folder: Path) -> None:
    """Write the small files of the target to `folder`: config, tokenizer and those of its format.

    notes: name of each file of tensors -> what `PlannedFile.write` returned
    """
    if c.to is Format.HF:
        groups = _hf_groups(c)
        write_index(folder, {f: {n: t.num_bytes for n, t in groups[f].items()} for f in groups})
    else:
        (folder / TRACKER).write_text(str(ITERATION), encoding="utf-8")
    if c.to is Format.TORCH_DIST:
        assert c.layout is not None
        model = (c.layout, c.architecture, c.head)
        write_metadata(folder / ITERATION_FOLDER, notes, *model, _model_dtype(c))
    copy_side_files(c.config, folder, c.head, c.dtype)


def _check_space(c: Conversion, needed: int) -> None:
    """Raise UserError unless the target's disk has `needed` and another SPARE_BYTES bytes free."""
    place = next(path for path in (c.target, *c.target.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed + SPARE_BYTES > free:
        raise UserError(
            Problem(
                f"{c.target}",
                f"needs {needed / 1e9:.2f} GB, its disk has {free / 1e9:.2f} GB free",
                remedy="free some space or give a folder on another disk",
            )
        )
