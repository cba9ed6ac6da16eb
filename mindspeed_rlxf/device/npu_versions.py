"""Versions of Megatron-LM, MindSpeed, torch and CANN that go together on NPU.

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
TAGS = " or ".join(each.megatron_tag for each in SETS)
CORE, MINDSPEED = "megatron.core", "mindspeed"
TORCH_NPU = "torch_npu"
PACKAGES = (
    "torch", TORCH_NPU, packages.MEGATRON, "mindspeed", "ray", "transformers", "tokenizers",
    "safetensors", "numpy", "vllm", "vllm_ascend",
)  # fmt: skip


@dataclass(frozen=True)
class Installed:
    """Versions that this process would import; None = not found, or without a version.

    missing: modules of Megatron and MindSpeed that are not on the path; their pairs are not judged
    """

    torch: str | None
    torch_npu: str | None
    megatron_core: str | None
    mindspeed: str | None
    cann: str | None
    missing: tuple[str, ...] = ()


def read_versions() -> Installed:
    """Read the versions installed for this process, and which packages are missing."""
    return Installed(
        torch=packages.version("torch"),
        torch_npu=packages.version("torch_npu"),
        megatron_core=packages.version(packages.MEGATRON),
        mindspeed=packages.version("mindspeed"),
        cann=cann_version(),
        missing=tuple(name for name in (CORE, MINDSPEED) if packages.folder_of(name) is None),
    )


@dataclass(frozen=True)
class Problem:
    """A version that does not fit. fatal: it cannot work; else it was never tried"""

    rule: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.rule}; {self.remedy}"


def check() -> list[str]:
    """Return warnings about this process's installation. Raises ValueError where it cannot work."""
    problems = list(source_problems()) or list(pair_problems(read_versions()))
    fatal = [str(problem) for problem in problems if problem.fatal]
    if fatal:
        raise ValueError("; ".join(fatal))
    return [str(problem) for problem in problems]


def source_problems() -> Iterator[Problem]:
    """Report MindSpeed that is missing, and Megatron-LM that is incomplete or of two checkouts."""
    core, training = (packages.folder_of(f"megatron.{part}") for part in ("core", "training"))
    if training is None:
        yield Problem(
            "MindSpeed needs the package megatron.training, which the megatron-core wheel lacks"
            f" (megatron.core: {core or 'not found'})",
            f"put a checkout of Megatron-LM, tag {TAGS}, on PYTHONPATH of every node before "
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
    """Return the known set of versions for this minor version of megatron-core, or None."""
    wanted = Version(megatron_core).release[:2]
    return next((s for s in SETS if Version(s.megatron_core).release[:2] == wanted), None)


def pair_problems(versions: Installed) -> Iterator[Problem]:
    """Report versions that do not go together, or are not known to."""
    yield from _torch_problems(versions)
    if CORE not in versions.missing:  # else that is its own problem
        yield from _megatron_problems(versions)
    yield from _cann_problems(versions)


def _torch_problems(versions: Installed) -> Iterator[Problem]:
    """Report a torch_npu whose release number is not torch's."""
    if versions.torch and versions.torch_npu:
        torch, npu = Version(versions.torch), Version(versions.torch_npu)
        if torch.release != npu.release:
            yield Problem(
                f"torch_npu {npu} must have the number of torch, which is {torch}",
                f"pip install torch_npu=={'.'.join(map(str, torch.release))}.*",
            )


def _megatron_problems(versions: Installed) -> Iterator[Problem]:
    """Report Megatron-LM and torch of no known set, and MindSpeed of another minor version."""
    core, mindspeed, torch = versions.megatron_core, versions.mindspeed, versions.torch
    chosen = set_for(core) if core else None
    use_tag = f"use Megatron-LM {TAGS}"
    if chosen is None:
        yield Problem(f"Megatron-LM {core} is in no set of constraints/", use_tag, fatal=False)
    elif torch and Version(torch).base_version not in chosen.torch:
        rule = f"torch {torch} is not that of {chosen.name}"
        yield Problem(rule, f"use torch {' or '.join(chosen.torch)}", fatal=False)
    if MINDSPEED in versions.missing:
        return
    if mindspeed is None:
        rule = "MindSpeed is on the path without setup.py or metadata: its version is not known"
        yield Problem(rule, "pip install -e its checkout", fatal=False)
    elif core and Version(core).release[:2] != Version(mindspeed).release[:2]:
        remedy = f"check out MindSpeed {chosen.mindspeed_branch}" if chosen else use_tag
        yield Problem(f"MindSpeed {mindspeed} must pair with Megatron-LM {core}", remedy)


def _cann_problems(versions: Installed) -> Iterator[Problem]:
    """Report a torch_npu that torch_npu's own table does not pair with this CANN."""
    torch_npu, cann = versions.torch_npu, versions.cann
    if torch_npu and cann:
        wanted = TORCH_NPU_OF_CANN.get(".".join(cann.split(".")[:2]), ())
        if Version(torch_npu).public not in wanted:
            known = ", ".join(TORCH_NPU_OF_CANN)
            yield Problem(
                f"torch_npu {torch_npu} with CANN {cann} is not in torch_npu's own table of pairs",
                f"install torch_npu {' or '.join(wanted)}" if wanted else f"use CANN {known}",
                fatal=False,
            )


def cann_version() -> str | None:
    """Find the version of CANN: of the one whose set_env.sh was sourced, or in the usual folder."""
    named = [os.environ.get(name) for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")]
    for root in (*filter(None, named), *CANN_ROOTS):
        for pattern in CANN_FILES:
            for file in sorted(Path(root).glob(pattern)):
                text = file.read_text(encoding="utf-8", errors="replace")
                if found := CANN_VERSION.search(text):
                    return found[1]
    return None
