"""Check that the versions of Megatron-LM, MindSpeed, torch and CANN fit each other on NPU.

Megatron and MindSpeed are not imported here, because the order of their imports matters
(`device/npu.py`). Their versions are read from files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from mindspeed_rlxf import packages
from mindspeed_rlxf.device.npu_sets import SETS, TORCH_NPU_OF_CANN, VersionSet

CANN_ROOTS = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest")
CANN_FILES = ("*/ascend_toolkit_install.info", "version.cfg", "*/version.info", "version.info")
CANN_VERSION = re.compile(r"^\W*\w*version\w*\W*?=\W*([0-9]+\.[0-9][\w.]*)", re.I | re.M)
TAGS = " or ".join(each.megatron_tag for each in SETS)
BRANCHES = " or ".join(each.mindspeed_branch for each in SETS)
CORE, MINDSPEED = "megatron.core", "mindspeed"
TORCH_NPU = "torch_npu"
PACKAGES = (
    "torch", TORCH_NPU, packages.MEGATRON, "mindspeed", "ray", "transformers", "tokenizers",
    "safetensors", "numpy", "vllm", "vllm_ascend",
)  # fmt: skip


@dataclass(frozen=True)
class Installed:
    """Versions that this process would import; None = not installed, or version unknown.

    missing: which of the modules CORE and MINDSPEED are not on the path; their versions are not
             compared
    """

    torch: str | None
    torch_npu: str | None
    megatron_core: str | None
    mindspeed: str | None
    cann: str | None
    missing: tuple[str, ...] = ()


def read_versions() -> Installed:
    """Return the versions that this process would import, from files; imports none of them.

    None for what is not installed; `missing` names absent packages of Megatron and MindSpeed.
    """
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
    """A fault of the installation. fatal: it cannot work; otherwise nobody has tried it"""

    rule: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.rule}; {self.remedy}"


def check() -> list[str]:
    """Return warnings about versions that were not tried together.

    Raises ValueError, with all fatal problems, if the installation cannot work. Versions are
    compared only if `source_problems` finds none.
    """
    problems = list(source_problems()) or list(pair_problems(read_versions()))
    fatal = [str(problem) for problem in problems if problem.fatal]
    if fatal:
        raise ValueError("; ".join(fatal))
    return [str(problem) for problem in problems]


def source_problems() -> Iterator[Problem]:
    """Yield fatal problems of the packages of Megatron-LM and MindSpeed on the path.

    They are: megatron.training is missing; megatron.core is missing or from another checkout;
    MindSpeed is missing, or its version cannot work (`_adaptor_problems`).
    """
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
    mindspeed = packages.folder_of("mindspeed")
    if mindspeed is None:
        yield Problem(
            "device.kind=npu needs MindSpeed, which is not on the path",
            f"put a checkout of its branch {BRANCHES} on PYTHONPATH of every node",
        )
    else:
        yield from _adaptor_problems(mindspeed)


def _adaptor_problems(mindspeed: Path) -> Iterator[Problem]:
    """Yield a fatal problem if MindSpeed needs MegatronAdaptor, else if it lacks `repatch`.

    Files are read instead of the version: from core_r0.17.0 on MindSpeed is one of three packages,
    and its setup.py still says 0.12.1.
    """
    remedy = f"check out its branch {BRANCHES}"
    if "import megatron_adaptor" in read_text(mindspeed / "__init__.py"):
        rule = f"MindSpeed ({mindspeed}) needs MegatronAdaptor and TransformerEngineNPU beside it"
        yield Problem(f"{rule}, as from core_r0.17.0 on, which was not tried", remedy)
    elif "def repatch(" not in read_text(mindspeed / "megatron_adaptor.py"):
        rule = f"MindSpeed ({mindspeed}) must have mindspeed.megatron_adaptor.repatch"
        yield Problem(f"{rule}, which 2.1.0 and older lack", remedy)


def read_text(file: Path) -> str:
    """Return the text of a file, invalid UTF-8 replaced; "" if there is no such file."""
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def find_set(megatron_core: str) -> VersionSet | None:
    """Return the set for this megatron-core, compared by minor version; None if SETS has none."""
    wanted = Version(megatron_core).release[:2]
    return next((s for s in SETS if Version(s.megatron_core).release[:2] == wanted), None)


def pair_problems(versions: Installed) -> Iterator[Problem]:
    """Yield a problem for each pair of versions that do not fit, or were not tried together.

    Pairs, in this order: torch_npu and torch; if Megatron-LM is on the path, it with torch and
    MindSpeed; torch_npu and CANN.
    """
    yield from _torch_problems(versions)
    if CORE not in versions.missing:  # a missing one is reported by itself
        yield from _megatron_problems(versions)
    yield from _cann_problems(versions)


def _torch_problems(versions: Installed) -> Iterator[Problem]:
    """Yield a fatal problem if torch_npu's release number, such as 2.7.1, is not torch's.

    Nothing if one of both is not installed.
    """
    if versions.torch and versions.torch_npu:
        torch, npu = Version(versions.torch), Version(versions.torch_npu)
        if torch.release != npu.release:
            yield Problem(
                f"torch_npu {npu} must have the number of torch, which is {torch}",
                f"pip install torch_npu=={'.'.join(map(str, torch.release))}.*",
            )


def _megatron_problems(versions: Installed) -> Iterator[Problem]:
    """Yield problems with the versions of Megatron-LM, which must be there, and MindSpeed.

    Warnings: a Megatron-LM that is in no set, or has a torch of another set; a Megatron-LM or
    MindSpeed without a version. Fatal: a MindSpeed of another minor version than Megatron-LM. An
    absent MindSpeed is not looked at.
    """
    core, mindspeed, torch = versions.megatron_core, versions.mindspeed, versions.torch
    chosen = find_set(core) if core else None
    use_tag = f"use Megatron-LM {TAGS}"
    if core is None:
        rule = "Megatron-LM is on the path without package_info.py or metadata"
        yield Problem(f"{rule}: its version is not known", use_tag, fatal=False)
    elif chosen is None:
        yield Problem(f"Megatron-LM {core} is in no set of constraints/", use_tag, fatal=False)
    elif torch and Version(torch).base_version not in chosen.torch:
        rule = f"torch {torch} is not that of {chosen.name}"
        yield Problem(rule, f"use torch {' or '.join(chosen.torch)}", fatal=False)
    if MINDSPEED in versions.missing:
        return
    if mindspeed is None:
        rule = "MindSpeed is on the path without setup.py or metadata: its version is not known"
        yield Problem(rule, "use a whole checkout of it", fatal=False)
    elif core and Version(core).release[:2] != Version(mindspeed).release[:2]:
        remedy = f"check out MindSpeed {chosen.mindspeed_branch}" if chosen else use_tag
        yield Problem(f"MindSpeed {mindspeed} must pair with Megatron-LM {core}", remedy)


def _cann_problems(versions: Installed) -> Iterator[Problem]:
    """Yield a warning if TORCH_NPU_OF_CANN does not list this torch_npu for this minor CANN.

    Nothing if one of the two was not found; a CANN that the table lacks is a warning too. The table
    is torch_npu's own.
    """
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
    """Return the first version in the files of CANN; None when no file has one.

    Looks in ASCEND_TOOLKIT_HOME and ASCEND_HOME_PATH, which set_env.sh sets, then in CANN_ROOTS.
    """
    named = [os.environ.get(name) for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")]
    for root in (*filter(None, named), *CANN_ROOTS):
        for pattern in CANN_FILES:
            for file in sorted(Path(root).glob(pattern)):
                if found := CANN_VERSION.search(read_text(file)):
                    return found[1]
    return None
