"""Conversion of weights between Hugging Face and Megatron folders, one tensor at a time."""

from __future__ import annotations

import errno
import re
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
    check_side_files,
    copy_side_files,
    is_scorer,
    open_weights,
)
from mindspeed_rlxf.weights.formats import Format, find_weights
from mindspeed_rlxf.weights.hf_folder import hf_file_name, shape_problems, write_index
from mindspeed_rlxf.weights.layout import ITERATION, TRACKER, MegatronLayout
from mindspeed_rlxf.weights.legacy import legacy_files
from mindspeed_rlxf.weights.planned import PlannedFile, PlannedTensor, Wrote
from mindspeed_rlxf.weights.reader import refuse, unknown_names
from mindspeed_rlxf.weights.safetensors_file import write_safetensors
from mindspeed_rlxf.weights.staging import StagedFolder
from mindspeed_rlxf.weights.torch_dist import dist_files, write_metadata

ITERATION_FOLDER = f"iter_{ITERATION:07d}"
SPARE_BYTES = 1 << 20  # for everything beside the tensors

DTYPE_NAMES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Progress = Callable[[int, int], None]
"""Called with (bytes written so far, bytes in all)."""


@dataclass(frozen=True)
class Conversion:
    """A conversion whose arguments are checked; `ops.conversion.plan_conversion` makes it.

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


def convert(conversion: Conversion, progress: Progress) -> int:
    """Write the target folder; reuse files that an interrupted run of the same conversion finished.

    Returns the number of bytes of tensors in reused files. The target appears under its name once
    complete.
    progress: called with (bytes done, bytes in all) before the first file and after each tensor;
              reused files count as done
    Raises UserError when the target exists (unless it may be replaced), another process writes it,
    the partial folder has other files, the disk is too small, tensors to be joined differ in dtype,
    the source is damaged, or a file cannot be read or written; DiskFull when the disk or the quota
    is full.
    """
    c = conversion
    files = _plan_files(c)
    staged = StagedFolder(c.target, _fingerprint(c), c.replace)
    try:
        kept = [file for file in files if staged.is_finished(file.path)]
        done = reused = sum(file.num_bytes for file in kept)
        total = sum(file.num_bytes for file in files)
        _check_space(c, total - done)
        progress(done, total)

        def wrote(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        for file in files:
            if file not in kept:
                staged.write(file.path, partial(_write_planned, file, wrote))
        staged.write_beside(partial(_write_beside, c, staged, files))
        staged.publish()
    except UserError:
        raise
    except ValueError as error:  # damage of the source that shows when its bytes are read
        raise UserError(Problem("", str(error))) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            rule = f"cannot be read or written ({error.strerror})"
            remedy = "mend that and run the same command again; finished files are kept"
            raise UserError(Problem(f"{error.filename or c.target}", rule, remedy=remedy)) from None
        raise DiskFull(
            f"the disk of {c.target} is full; free some space and run the same command again, "
            "finished files are kept"
        ) from None
    finally:
        staged.close()
    return reused


def _write_planned(file: PlannedFile, wrote: Wrote, folder: Path) -> Any:
    return file.write(folder / file.path, wrote=wrote)


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


def _write_beside(
    c: Conversion, staged: StagedFolder, files: list[PlannedFile], folder: Path
) -> None:
    """Write the small files of the target to `folder`: config, tokenizer and those of its format.

    These are, for Hugging Face, the index (of several files); else the tracker file and, for
    torch_dist, the metadata in the iteration's subfolder, which is made.
    """
    if c.to is Format.HF:
        groups = _hf_groups(c)
        write_index(folder, {f: {n: t.num_bytes for n, t in groups[f].items()} for f in groups})
    else:
        (folder / TRACKER).write_text(str(ITERATION), encoding="utf-8")
    if c.to is Format.TORCH_DIST:
        assert c.layout is not None
        notes = {Path(file.path).name: staged.note(file.path) for file in files}
        place, model = folder / ITERATION_FOLDER, (c.layout, c.architecture, c.head)
        place.mkdir()
        write_metadata(place, notes, *model, _model_dtype(c))
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


def _fingerprint(c: Conversion) -> dict[str, Any]:
    """Return what determines the target's bytes: options; path, size and time of the weight files.

    Weight files are those that end with .safetensors, .pt or .distcp in the folder that has the
    weights or below it, sorted by path; paths are relative to it. Its resolved path is in the
    result, under "folder". `shard_size` is None unless the target is Hugging Face.
    """
    _, place = find_weights(c.source)
    files = sorted(
        path for path in place.rglob("*") if re.search(r"\.(safetensors|pt|distcp|bin)$", path.name)
    )
    return {
        "source": [
            [str(path.relative_to(place)), path.stat().st_size, path.stat().st_mtime_ns]
            for path in files
        ],
        "folder": str(place.resolve()),
        "to": c.to.value,
        "head": c.head.value,
        "architecture": c.architecture.model_dump(mode="json"),
        "layout": None if c.layout is None else str(c.layout),
        "dtype": str(c.dtype),
        "shard_size": c.shard_size if c.to is Format.HF else None,
    }
