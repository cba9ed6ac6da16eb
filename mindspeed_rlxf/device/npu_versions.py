"""Which Megatron-LM, MindSpeed and torch go together on NPU, and what this process would import.

Nothing of Megatron or MindSpeed is imported here: their versions are read from files, because the
order in which they are imported matters (`device/npu.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from mindspeed_rlxf import packages


@dataclass(frozen=True)
class VersionSet:
    """One set of `constraints/`. torch: releases that its parts are published for."""

    name: str
    megatron_core: str
    megatron_tag: str  # of github.com/NVIDIA/Megatron-LM
    megatron_commit: str  # of the tag, which can be moved
    mindspeed: str
    mindspeed_branch: str
    mindspeed_commit: str  # of the branch, which goes on
    torch: tuple[str, ...]
    python: tuple[str, ...]


SETS = (
    VersionSet(
        "npu-core0.12.1",
        "0.12.1", "core_v0.12.1", "a845aa7e12b3a117e24c2352b9e3e60bad2e3a17",
        "0.12.1", "26.1.0_core_r0.12.1", "57a33053c4eccd5b14aa58e3ca595ab414e65b94",
        ("2.7.1",), ("3.10", "3.11"),
    ),
    VersionSet(
        "npu-core0.16",
        "0.16.1", "core_v0.16.1", "55ac7082517c3878ae653c07c09c534b8aed49f6",
        "0.16.0", "core_r0.16.0", "e4772499f7eb9fa9a68919dd1eaddef00e915b2d",
        ("2.7.1", "2.9.0"), ("3.10", "3.11"),
    ),
)  # fmt: skip
# CANN -> releases of torch_npu made for it (its own table of releases); a release of torch_npu
# pairs with the torch of the same number, whatever its `.post`.
TORCH_NPU_OF_CANN: Mapping[str, tuple[str, ...]] = {
    "8.5": ("2.6.0.post5", "2.7.1.post2", "2.8.0.post2", "2.9.0"),
    "9.0": ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2", "2.10.0"),
    "9.1": (
        "2.7.1.post8", "2.9.0.post6", "2.10.0.post4", "2.11.0", "2.12.0",
        "2.7.1.post10", "2.9.0.post8", "2.10.0.post6", "2.11.0.post2", "2.12.0.post2",
    ),
}  # fmt: skip
CANN_ROOTS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
CANN_FILES = ("*/ascend_toolkit_install.info", "version.cfg", "*/version.info", "version.info")
CANN_VERSION = re.compile(r"^\W*\w*version\w*\W*?=\W*([0-9]+\.[0-9][\w.]*)", re.I | re.M)
CORE, MINDSPEED = "megatron.core", "mindspeed"
TORCH_NPU = "torch_npu"
PACKAGES = (
    "torch", TORCH_NPU, packages.MEGATRON, "mindspeed", "ray", "transformers", "tokenizers",
    "safetensors", "numpy", "vllm", "vllm_ascend",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What this process would import; None = not found, or without a version.

    missing: modules of Megatron and MindSpeed that are not on the path, of which no pair is judged
    """

    torch: str | None
    torch_npu: str | None
    megatron_core: str | None
    mindspeed: str | None
    cann: str | None
    missing: tuple[str, ...] = ()


def found() -> Found:
    return Found(
        torch=packages.version("torch"),
        torch_npu=packages.version("torch_npu"),
        megatron_core=packages.version(packages.MEGATRON),
        mindspeed=packages.version("mindspeed"),
        cann=cann_version(),
        missing=tuple(name for name in (CORE, MINDSPEED) if packages.folder_of(name) is None),
    )


@dataclass(frozen=True)
class Problem:
    """what: the rule and what is there instead; fatal: it cannot work, else nobody has tried it."""

    what: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


def check() -> list[str]:
    """Warnings about this process's installation. Raises ValueError where it cannot work."""
    problems = list(source_problems()) or list(pair_problems(found()))
    fatal = [str(problem) for problem in problems if problem.fatal]
    if fatal:
        raise ValueError("; ".join(fatal))
    return [str(problem) for problem in problems]


def source_problems() -> Iterator[Problem]:
    """Where MindSpeed is missing, would miss a part of Megatron-LM, or find two of them."""
    core, training = (packages.folder_of(f"megatron.{part}") for part in ("core", "training"))
    tags = " or ".join(each.megatron_tag for each in SETS)
    if training is None:
        yield Problem(
            "MindSpeed needs the package megatron.training, which the megatron-core wheel lacks"
            f" (megatron.core: {core or 'not found'})",
            f"put a checkout of Megatron-LM, tag {tags}, on PYTHONPATH of every node before "
            "`ray start`",
        )
    elif core is None or core.parent != training.parent:
        yield Problem(
            f"megatron.core ({core}) and megatron.training ({training}) must come from one "
            "Megatron-LM checkout",
            "put it first on PYTHONPATH, or uninstall the other",
        )
    if packages.folder_of("mindspeed") is None:
        branches = " or ".join(each.mindspeed_branch for each in SETS)
        yield Problem(
            "device.kind=npu needs MindSpeed, which is not on the path",
            f"pip install -e a checkout of its branch {branches}, or put it on PYTHONPATH of "
            "every node",
        )


def set_for(megatron_core: str) -> VersionSet | None:
    """The set of this minor version of megatron-core."""
    wanted = Version(megatron_core).release[:2]
    return next((s for s in SETS if Version(s.megatron_core).release[:2] == wanted), None)


def pair_problems(there: Found) -> Iterator[Problem]:
    """Versions that do not go together, and pairs that are not known to."""
    yield from _torch(there)
    yield from _megatron(there)
    yield from _cann(there)


def _torch(there: Found) -> Iterator[Problem]:
    if there.torch and there.torch_npu:
        torch, npu = Version(there.torch), Version(there.torch_npu)
        if torch.release != npu.release:
            yield Problem(
                f"torch_npu {npu} must have the number of torch, which is {torch}",
                f"pip install torch_npu=={'.'.join(map(str, torch.release))}.*",
            )


def _megatron(there: Found) -> Iterator[Problem]:
    chosen = set_for(there.megatron_core) if there.megatron_core else None
    if CORE in there.missing:  # its own problem
        return
    if chosen is None:
        tags = " or ".join(each.megatron_tag for each in SETS)
        what = f"Megatron-LM {there.megatron_core} is in no set of constraints/"
        yield Problem(what, f"use Megatron-LM {tags}", fatal=False)
    elif there.torch and Version(there.torch).base_version not in chosen.torch:
        what = f"torch {there.torch} is not that of {chosen.name}"
        yield Problem(what, f"use torch {' or '.join(chosen.torch)}", fatal=False)
    if MINDSPEED in there.missing:
        return
    if there.mindspeed is None:
        what = "MindSpeed is on the path without setup.py or metadata: its version is not known"
        yield Problem(what, "pip install -e its checkout", fatal=False)
    elif there.megatron_core:
        core, mindspeed = Version(there.megatron_core), Version(there.mindspeed)
        if core.release[:2] != mindspeed.release[:2]:
            tags = " or ".join(s.megatron_tag for s in SETS)
            yield Problem(
                f"MindSpeed {mindspeed} must pair with Megatron-LM {core}",
                f"check out MindSpeed {chosen.mindspeed_branch}"
                if chosen
                else f"use Megatron-LM {tags}",
            )


def _cann(there: Found) -> Iterator[Problem]:
    if there.torch_npu and there.cann:
        release = ".".join(there.cann.split(".")[:2])
        wanted = TORCH_NPU_OF_CANN.get(release, ())
        if Version(there.torch_npu).public not in wanted:
            known = ", ".join(TORCH_NPU_OF_CANN)
            yield Problem(
                f"torch_npu {there.torch_npu} with CANN {there.cann} is no pair of torch_npu's own "
                "table",
                f"install torch_npu {' or '.join(wanted)}" if wanted else f"use CANN {known}",
                fatal=False,
            )


def cann_version() -> str | None:
    """Version of the CANN whose set_env.sh was sourced, else of that in the usual folder."""
    named = [os.environ.get(name) for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")]
    for root in (*filter(None, named), *CANN_ROOTS):
        for pattern in CANN_FILES:
            for file in sorted(Path(root).glob(pattern)):
                text = file.read_text(encoding="utf-8", errors="replace")
                if found := CANN_VERSION.search(text):
                    return found[1]
    return None
