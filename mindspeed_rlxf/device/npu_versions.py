"""Which Megatron-LM, MindSpeed and torch go together on NPU, and what this process would import.

Nothing of Megatron or MindSpeed is imported here: their versions are read from files, because the
order in which they are imported matters (`device/npu.py`).
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from mindspeed_rlxf.device import version_sets

NUMBERS = ("MAJOR", "MINOR", "PATCH")


@dataclass(frozen=True)
class VersionSet:
    """One set of `constraints/`. torch: releases that its parts are published for."""

    name: str
    megatron_core: str
    megatron_tag: str  # of github.com/NVIDIA/Megatron-LM
    mindspeed: str
    mindspeed_branch: str
    torch: tuple[str, ...]
    python: tuple[str, ...]


SETS = (
    VersionSet(
        "npu-core0.12.1", "0.12.1", "core_v0.12.1", "0.12.1", "26.1.0_core_r0.12.1",
        ("2.7.1",), ("3.10", "3.11"),
    ),
    VersionSet(
        "npu-core0.16", "0.16.1", "core_v0.16.1", "0.16.0", "core_r0.16.0",
        ("2.7.1", "2.9.0"), ("3.10", "3.11"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What this process would import; None = not found, or without a version."""

    torch: str | None
    torch_npu: str | None
    megatron_core: str | None
    mindspeed: str | None
    cann: str | None


def found() -> Found:
    return Found(
        _installed("torch"),
        _installed("torch_npu"),
        megatron_core_version(),
        _installed("mindspeed"),
        version_sets.cann_version(),
    )


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def folder_of(module: str) -> Path | None:
    """Where a package would be imported from; imports its parents only, which here hold no code."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def megatron_core_version() -> str | None:
    """Of the sources on the path, not of a wheel that they hide."""
    folder = folder_of("megatron.core")
    file = folder / "package_info.py" if folder else None
    if file is None or not file.is_file():
        return None
    values = {
        target.id: node.value.value
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if not values.keys() >= set(NUMBERS):
        return None
    return ".".join(str(values[name]) for name in NUMBERS)


def check_sources() -> None:
    """Raises ValueError where MindSpeed would miss a part of Megatron-LM, or find two of them."""
    core, training = folder_of("megatron.core"), folder_of("megatron.training")
    tags = " or ".join(each.megatron_tag for each in SETS)
    if training is None:
        raise ValueError(
            "MindSpeed needs the package megatron.training, which the megatron-core wheel lacks"
            f" (megatron.core: {core or 'not found'}); put a checkout of Megatron-LM, tag {tags}, "
            "on PYTHONPATH of every node before `ray start`"
        )
    if core is None or core.parent != training.parent:
        raise ValueError(
            f"megatron.core ({core}) and megatron.training ({training}) must come from one "
            "Megatron-LM checkout; put it first on PYTHONPATH, or uninstall the other"
        )
    if folder_of("mindspeed") is None:
        branches = " or ".join(each.mindspeed_branch for each in SETS)
        raise ValueError(
            f"device.kind=npu needs MindSpeed, which is not on the path; pip install -e a checkout "
            f"of its branch {branches}, or put it on PYTHONPATH of every node"
        )


def check_pairs(there: Found) -> list[str]:
    """Warnings about pairs that are not known to work. Raises ValueError for pairs that cannot."""
    problems, warnings = list(_broken(there)), list(_untried(there))
    if problems:
        raise ValueError("; ".join(problems))
    return warnings


def set_for(megatron_core: str) -> VersionSet | None:
    """The set of this minor version of megatron-core."""
    wanted = Version(megatron_core).release[:2]
    return next((s for s in SETS if Version(s.megatron_core).release[:2] == wanted), None)


def _broken(there: Found) -> Iterator[str]:
    if there.torch and there.torch_npu:
        torch, npu = Version(there.torch), Version(there.torch_npu)
        if torch.release != npu.release:
            yield (
                f"torch_npu {npu} must have the number of torch, which is {torch}; "
                f"pip install torch_npu=={'.'.join(map(str, torch.release))}.*"
            )
    if there.megatron_core and there.mindspeed:
        core, mindspeed = Version(there.megatron_core), Version(there.mindspeed)
        if core.release[:2] != mindspeed.release[:2]:
            chosen = set_for(there.megatron_core)
            remedy = (
                f"check out MindSpeed {chosen.mindspeed_branch}"
                if chosen
                else f"use Megatron-LM {' or '.join(s.megatron_tag for s in SETS)}"
            )
            yield f"MindSpeed {mindspeed} must pair with Megatron-LM {core}; {remedy}"


def _untried(there: Found) -> Iterator[str]:
    chosen = set_for(there.megatron_core) if there.megatron_core else None
    if chosen is None:
        known = ", ".join(s.megatron_tag for s in SETS)
        yield f"Megatron-LM {there.megatron_core} is in no set of constraints/ (these hold {known})"
    elif there.torch and Version(there.torch).base_version not in chosen.torch:
        yield f"torch {there.torch} is not one of {', '.join(chosen.torch)}, as in {chosen.name}"
    if there.mindspeed is None:
        yield "MindSpeed is on the path without being installed: its version is not known"
    if there.torch_npu and there.cann:
        release = ".".join(there.cann.split(".")[:2])
        wanted = version_sets.TORCH_NPU_OF_CANN.get(release, ())
        if Version(there.torch_npu).public not in wanted:
            yield (
                f"torch_npu {there.torch_npu} with CANN {there.cann} is no pair of torch_npu's own "
                f"table, which for CANN {release} has {', '.join(wanted) or 'no line'}"
            )
