"""Conversion of weights between Hugging Face and Megatron folders, one tensor at a time."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import ValidationError
from torch import Tensor

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.hf_config import find_unsupported, parse_architecture, read_hf_config
from mindspeed_rlxf.config.messages import problems_of
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    Head,
    Slice,
    Split,
    StageParameter,
    hf_shapes,
    shard_slices,
)
from mindspeed_rlxf.weights.folders import (
    check_side_files,
    copy_side_files,
    is_scorer,
    open_weights,
)
from mindspeed_rlxf.weights.formats import INDEX, SINGLE, Format, find_weights
from mindspeed_rlxf.weights.hf_folder import HfFolder, shape_problems
from mindspeed_rlxf.weights.layout import ITERATION, TRACKER, MegatronLayout
from mindspeed_rlxf.weights.legacy import (
    MakeShard,
    legacy_files,
    padded,
    shard_shape,
)
from mindspeed_rlxf.weights.reader import IGNORED, MegatronWeights, refuse
from mindspeed_rlxf.weights.role_state import RunState
from mindspeed_rlxf.weights.safetensors_writer import DTYPES, write_safetensors
from mindspeed_rlxf.weights.staging import StagedFolder
from mindspeed_rlxf.weights.torch_dist_writer import dist_files, write_metadata
from mindspeed_rlxf.weights.torch_file import ChangedBytes
from mindspeed_rlxf.weights.torch_file_writer import PlannedTensor

ITERATION_FOLDER = f"iter_{ITERATION:07d}"
SPARE_BYTES = 1 << 20  # for what stands beside the tensors

Progress = Callable[[int, int], None]
"""Told the bytes that are written, and of how many."""


@dataclass(frozen=True)
class Conversion:
    """What to convert. `cli.convert.plan` makes it, all checked.

    config:     the folder of config.json and the tokenizer
    target:     the folder that appears
    layout:     of a Megatron target
    dtype:      None = each tensor keeps its own
    shard_size: bytes of one file of a Hugging Face target, at most, unless one tensor is larger
    """

    source: Path
    config: Path
    target: Path
    to: Format
    architecture: ArchitectureConfig
    head: Head
    weights: HfFolder | MegatronWeights | RunState
    layout: MegatronLayout | None
    dtype: torch.dtype | None
    shard_size: int
    replace: bool

    @property
    def shares_groups(self) -> bool:
        """Whether the files are those of ranks of which several share a query group."""
        ranks = self.layout.tp if self.layout and self.to is Format.LEGACY else 1
        return ranks > self.architecture.kv_heads


class Part(Protocol):
    """A file of the target."""

    @property
    def path(self) -> str: ...

    def write(self, folder: Path, shard: MakeShard, wrote: Callable[[int], None]) -> Any: ...

    def num_bytes(self, shard: MakeShard) -> int: ...


@dataclass(frozen=True)
class HfFile:
    """A safetensors file, to be written."""

    path: str
    tensors: dict[str, PlannedTensor]

    def write(self, folder: Path, shard: MakeShard, wrote: Callable[[int], None]) -> None:
        write_safetensors(folder / self.path, self.tensors, wrote)

    def num_bytes(self, shard: MakeShard) -> int:
        return sum(planned.num_bytes for planned in self.tensors.values())


def read_architecture(folder: Path) -> tuple[ArchitectureConfig, dict[str, Any]]:
    """The model that a folder's config.json describes, and that config.

    Errors: UserError when it is missing, wrong, or describes what no model here is.
    """
    file = f"{folder}/config.json"
    try:
        check_side_files(folder)
        config = read_hf_config(folder)
        if found := find_unsupported(config):
            rule = "asks for what no model here has (field: possible, config.json)"
            raise UserError(
                Problem(file, f"{rule}: {'; '.join(found)}", remedy="use another model")
            )
        fields = {k: v for k, v in parse_architecture(config).items() if v is not None}
        return ArchitectureConfig(**fields), config
    except ValidationError as error:
        wrong = "; ".join(map(str, problems_of(error)))
        raise UserError(Problem(file, f"describes no model: {wrong}", remedy="mend it")) from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(Problem("", str(error))) from None


def choose_head(config: dict[str, Any], orm: bool) -> Head:
    """A reward model has a score head: told by --orm or by config.json."""
    return Head.SCORE if orm or is_scorer(config) else Head.LANGUAGE_MODEL


def open_source(
    source: Path, architecture: ArchitectureConfig, head: Head
) -> HfFolder | MegatronWeights | RunState:
    """The weights to convert. Errors: UserError when they do not fit the model in any way."""
    try:
        weights = open_weights(source, architecture)
        expected = hf_shapes(architecture, head)
        scored = "score.weight" in weights
        if scored and head is Head.LANGUAGE_MODEL:
            raise ValueError(f"{source} holds a reward model; add --orm")
        if not scored and head is Head.SCORE:
            raise ValueError(f"{source} holds no score head; leave --orm out")
        refuse(source, shape_problems(weights, expected))
        refuse(source, [f"{name} is not in the model" for name in _extra(weights, expected)])
    except ValueError as error:
        raise UserError(Problem("", str(error))) from None
    return weights


def _extra(weights: HfFolder | MegatronWeights | RunState, expected: dict[str, Any]) -> list[str]:
    """Tensors that would be lost; an output layer that is tied, or not used by a scorer, is not."""
    known = expected.keys() | {"lm_head.weight"}
    return [name for name in weights.names() if name not in known and not IGNORED.search(name)]


def convert(conversion: Conversion, progress: Progress) -> int:
    """Write the target; returns the bytes of the parts that an earlier run had finished.

    Errors: UserError when the target is there, the disk is too small, or bytes of the source were
    changed; DiskFull.
    """
    c = conversion
    shard = _maker(c)
    parts = _parts(c, shard)
    sizes = {part.path: part.num_bytes(shard) for part in parts}
    staged = StagedFolder(c.target, _fingerprint(c), c.replace)
    try:
        kept = {part.path for part in parts if staged.finished(_place(c, part))}
        done = reused = sum(sizes[path] for path in kept)
        total = sum(sizes.values())
        _check_space(c, total - done)
        progress(done, total)

        def wrote(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        for part in parts:
            if part.path not in kept:
                write = partial(_write, part, _place(c, part), shard, wrote)
                staged.write(_place(c, part), write)
        _finish(c, staged, parts, sizes)
    except ChangedBytes as error:
        raise UserError(Problem("", str(error))) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise DiskFull(
            f"the disk of {c.target} is full; free some space and run the same command again, "
            "finished files are kept"
        ) from None
    finally:
        staged.close()
    return reused


def _write(
    part: Part, place: str, shard: MakeShard, wrote: Callable[[int], None], folder: Path
) -> Any:
    return part.write(folder / place.removesuffix(part.path), shard, wrote)


class DiskFull(Exception):
    """The disk filled up while parts were written."""


def _maker(c: Conversion) -> MakeShard:
    a, layout = c.architecture, c.layout

    def shard(parameter: StageParameter, tp_rank: int) -> PlannedTensor:
        assert layout is not None, "only Megatron parameters have shards"
        rows = layout.vocab_rows(a) if parameter.split is Split.VOCAB else None
        parts = shard_slices(parameter, a, tp_rank, layout.tp, rows)
        shape = shard_shape(parameter, a, tp_rank, layout.tp, rows)
        dtype = c.dtype or _common_dtype(c, parameter)

        def make() -> Tensor:
            pieces = [c.weights.read(part).to(dtype) for part in parts]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=parts[0].dim)
            return whole if rows is None else padded(whole, rows)

        return PlannedTensor(shape, dtype, make)

    return shard


def _common_dtype(c: Conversion, parameter: StageParameter) -> torch.dtype:
    """Of the tensors that Megatron joins into one."""
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


def _parts(c: Conversion, shard: MakeShard) -> list[Part]:
    if c.to is Format.HF:
        return list(_hf_files(c))
    assert c.layout is not None, "a Megatron target has a layout"
    if c.to is Format.LEGACY:
        dtype = c.dtype or c.weights.dtype("model.norm.weight")
        return list(legacy_files(c.layout, c.architecture, c.head, dtype))
    return list(dist_files(c.layout, c.architecture, c.head))


def _hf_files(c: Conversion) -> list[HfFile]:
    shapes = hf_shapes(c.architecture, c.head)
    groups: list[dict[str, PlannedTensor]] = [{}]
    held = 0
    for name, shape in shapes.items():
        planned = _whole(c, name, shape)
        if groups[-1] and held + planned.num_bytes > c.shard_size:
            groups.append({})
            held = 0
        groups[-1][name] = planned
        held += planned.num_bytes
    if len(groups) == 1:
        return [HfFile(SINGLE, groups[0])]
    return [
        HfFile(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tensors)
        for number, tensors in enumerate(groups, 1)
    ]


def _whole(c: Conversion, name: str, shape: tuple[int, ...]) -> PlannedTensor:
    dtype = c.dtype or c.weights.dtype(name)
    return PlannedTensor(
        shape, dtype, lambda: c.weights.read(Slice(name, 0, 0, shape[0])).to(dtype)
    )


def _place(c: Conversion, part: Part) -> str:
    """Of a part below the target."""
    return part.path if c.to is Format.HF else f"{ITERATION_FOLDER}/{part.path}"


def _finish(c: Conversion, staged: StagedFolder, parts: list[Part], sizes: dict[str, int]) -> None:
    """All that stands beside the parts, then the folder gets its name."""
    staged.write_beside(partial(_write_beside, c, staged, parts, sizes))
    staged.publish()


def _write_beside(
    c: Conversion, staged: StagedFolder, parts: list[Part], sizes: dict[str, int], folder: Path
) -> None:
    if c.to is Format.HF and len(parts) > 1:
        files = [part for part in parts if isinstance(part, HfFile)]
        weight_map = {name: file.path for file in files for name in file.tensors}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    if c.to is not Format.HF:
        (folder / TRACKER).write_text(str(ITERATION), encoding="utf-8")
    if c.to is Format.TORCH_DIST:
        assert c.layout is not None
        notes = {part.path: staged.note(_place(c, part)) for part in parts}
        dtype = c.dtype or c.weights.dtype("model.norm.weight")
        (folder / ITERATION_FOLDER).mkdir()
        write_metadata(folder / ITERATION_FOLDER, notes, c.layout, c.architecture, c.head, dtype)
    copy_side_files(c.config, folder, c.head, c.dtype)


def _check_space(c: Conversion, needed: int) -> None:
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
    """What decides the bytes of the parts: the source's files and every choice."""
    _, place = find_weights(c.source)
    files = sorted(
        path for path in place.rglob("*") if re.search(r"\.(safetensors|pt|distcp)$", path.name)
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


DTYPE_NAMES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
assert set(DTYPE_NAMES.values()) <= DTYPES.keys(), "every dtype can be written"
