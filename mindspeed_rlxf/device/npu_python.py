"""Check the Python packages of an NPU host, besides the versions that `npu_versions` compares.

torch_npu, MindSpeed and Megatron are not imported.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

from packaging.requirements import Requirement
from packaging.version import Version

from mindspeed_rlxf import packages
from mindspeed_rlxf.device import npu_sets, npu_versions
from mindspeed_rlxf.device.npu_install import Checked

COMMANDS = ("ray", "mindspeed-rlxf")
EDITABLE = ("megatron-core", "mindspeed")


def check_python(versions: npu_versions.Installed) -> Iterator[Checked]:
    """Yield the results for Python, the build of torch, packages and the commands on PATH.

    Packages: those of CANN, versions that were tried, copies on sys.path. Python is compared with
    the set of npu_sets.SETS for the installed Megatron, else with DEFAULT. triton-ascend is checked
    only for SETS[1]; an installed transformer_engine fails a check.
    versions: as installed
    """
    chosen = npu_versions.find_set(versions.megatron_core) if versions.megatron_core else None
    chosen = chosen or npu_sets.DEFAULT
    here = "{}.{}".format(*sys.version_info[:2])
    yield Checked(
        "npu.python",
        here in chosen.python,
        f"{here}; {chosen.name} was tested with {' and '.join(chosen.python)}",
        f"make the environment with Python {chosen.python[-1]}",
    )
    yield _check_torch_build(versions.torch, platform.machine())
    yield from _check_cann_packages(versions.cann)
    yield _check_tested()
    yield _check_copies(list(find_copies(sys.path)))
    if chosen is npu_sets.SETS[1]:
        yield _check_triton(packages.version("triton-ascend"), packages.version("triton"))
    if (engine := packages.folder_of("transformer_engine")) is not None:
        remedy = "pip uninstall transformer_engine: MindSpeed imports it, and it asks for CUDA"
        yield Checked("npu.transformer_engine", False, str(engine), remedy)
    yield _check_commands(Path(sys.executable).parent)


def _check_torch_build(torch: str | None, machine: str) -> Checked:
    """Check that torch is installed and not built for CUDA; else a warning.

    On x86_64 it must be the build `+cpu`; elsewhere any build but `+cu...` passes.
    torch: installed version, or None
    """
    local = (torch or "").partition("+")[2]
    number = Version(torch).base_version if torch else npu_sets.DEFAULT.torch[0]
    build = f"{number}+cpu" if machine == "x86_64" else number
    fits = local == "cpu" if machine == "x86_64" else not local.startswith("cu")
    return Checked(
        "npu.torch_build",
        torch is not None and fits,
        f"torch {torch} on {machine}",
        f"pip install torch=={build} --index-url {npu_sets.TORCH_INDEX}",
    )


def _check_cann_packages(cann: str | None) -> Iterator[Checked]:
    """Yield two results for the packages that CANN imports.

    `npu.cann_packages`: all are installed, else an error, as the first operator would fail;
    `npu.cann_ranges`: the installed ones are in CANN's ranges, else a warning.
    cann: its version; None = that of the default set
    """
    short = ".".join((cann or npu_sets.DEFAULT.cann).split(".")[:2])
    asked = (*npu_sets.CANN_PYTHON, *npu_sets.CANN_PYTHON_OF.get(short, ()))
    wanted = [Requirement(text) for text in asked]
    found = {each.name: packages.version(each.name) for each in wanted}
    missing = [name for name, version in found.items() if version is None]
    yield Checked(
        "npu.cann_packages",
        not missing,
        f"missing: {', '.join(missing)}" if missing else f"all {len(found)} that CANN imports",
        f"pip install {' '.join(missing)}",
        fatal=True,
    )
    wrong = [
        f"{each.name} {version}, not {each.specifier}"
        for each in wanted
        if (version := found[each.name]) and not each.specifier.contains(version, True)
    ]
    yield Checked(
        "npu.cann_ranges",
        not wrong,
        f"CANN {short}: {'; '.join(wrong) or 'within the ranges of its guide'}",
        f"use CANN {npu_sets.DEFAULT.cann}, which takes the versions of constraints/",
    )


def _check_tested() -> Checked:
    found = {name: packages.version(name) for name in npu_sets.TESTED}
    others = [
        f"{name} {version}"
        for name, version in found.items()
        if version and version not in npu_sets.TESTED[name]
    ]
    tested = "; ".join(f"{name} {', '.join(all_)}" for name, all_ in npu_sets.TESTED.items())
    return Checked(
        "npu.tested",
        not others,
        f"{', '.join(others)}: never tried" if others else "numpy and transformers as tested",
        f"tested are {tested}; `make install` brings those of the set where none is installed",
    )


def find_copies(path: Sequence[str]) -> Iterator[tuple[str, Path, str]]:
    """Yield (module, folder, version) once for each copy of Megatron and MindSpeed on the path.

    path: as sys.path; its folders are searched in order, then those of editable installs
    Modules are "megatron/core" and "mindspeed"; the folder has its links resolved; the version may
    be "unknown".
    """
    roots = [Path(entry or ".") for entry in path]
    for name in EDITABLE:
        try:
            text = metadata.distribution(name).read_text("direct_url.json") or ""
        except metadata.PackageNotFoundError:
            continue
        if '"editable": true' in text or '"editable":true' in text:
            url = text.partition('"url"')[2].partition('"')[2].partition('"')[0]
            roots.append(Path(unquote(urlparse(url).path)))
    seen = set()
    for root in roots:
        for module in ("megatron/core", "mindspeed"):
            folder = (root / module).resolve()
            if folder not in seen and (folder / "__init__.py").is_file():
                seen.add(folder)
                read = packages.core_version if module != "mindspeed" else packages.setup_version
                yield module, folder, read(folder) or "unknown"


def _check_copies(copies: Sequence[tuple[str, Path, str]]) -> Checked:
    """Check that all copies of a module have one version; else a warning.

    A wheel beside a checkout of the same version is fine. The first on the path is imported.
    copies: as `find_copies` yields them
    """
    both = [
        f"{module.replace('/', '.')} {version} in {folder.parents[module.count('/')]}"
        for module, folder, version in copies
        if len({v for m, _, v in copies if m == module}) > 1
    ]
    return Checked(
        "npu.copies",
        not both,
        "; ".join(both) or f"{len(copies)} folders of Megatron and MindSpeed, of one version each",
        "take the others off PYTHONPATH and `pip uninstall megatron-core mindspeed`, as images of "
        "MindSpeed carry their own; the first one named is imported",
    )


def _check_triton(ascend: str | None, stock: str | None) -> Checked:
    """Check that triton-ascend is installed, and is npu_sets.TRITON or newer beside a stock triton.

    MindSpeed for megatron-core 0.16 imports triton-ascend when it starts. A failure is an error.
    ascend, stock: installed versions of triton-ascend and triton; None = not installed
    """
    install = (
        f"pip install triton-ascend=={npu_sets.TRITON} --extra-index-url={npu_sets.TRITON_INDEX}"
    )
    fits = bool(ascend) and (stock is None or Version(str(ascend)) >= Version(npu_sets.TRITON))
    return Checked(
        "npu.triton",
        fits,
        f"triton-ascend {ascend or 'not installed'}, triton {stock or 'not installed'}",
        f"pip uninstall -y triton triton-ascend; {install}" if ascend else install,
        fatal=True,
    )


def _check_commands(folder: Path) -> Checked:
    """Check that PATH finds `ray` and `mindspeed-rlxf` in `folder`; else a warning.

    folder: of this environment's commands
    """
    others = []
    for name in COMMANDS:
        found = shutil.which(name)
        if found is None or Path(found).parent.resolve() != folder.resolve():
            others.append(f"{name}: {found or 'not found'}")
    return Checked(
        "npu.commands",
        not others,
        ", ".join(others) or f"{' and '.join(COMMANDS)} of {folder}",
        f"export PATH={folder}:$PATH, on every host before `ray start`",
    )
