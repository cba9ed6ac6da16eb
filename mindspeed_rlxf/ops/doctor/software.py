"""Check versions of installed packages, alone and in combination."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

from mindspeed_rlxf import device, packages
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import npu_versions
from mindspeed_rlxf.ops.doctor.findings import Finding, Status, error, judge, ok, warning

DISTRIBUTION = "mindspeed-rlxf"
OLDEST_PYTHON = (3, 10, 0)
REQUIRED = ("torch", "ray", "transformers", "safetensors", "numpy")


def check_software(kind: DeviceKind) -> list[Finding]:
    """Check versions of Python and packages; for NPU also CANN and which versions fit together.

    Beside REQUIRED, an NPU needs torch's package for it, other kinds need megatron-core.
    """
    kind = device.resolve_kind(kind)
    is_npu = kind is DeviceKind.NPU
    required = (*REQUIRED, npu_versions.TORCH_NPU if is_npu else packages.MEGATRON)
    versions = {name: packages.version(name) for name in npu_versions.PACKAGES}
    found = [python_finding(sys.version_info[:3]), *package_findings(versions, required)]
    return [*found, *(npu_findings() if is_npu else ())]


def python_finding(version: tuple[int, int, int]) -> Finding:
    """Return an error if Python is older than OLDEST_PYTHON, else `ok`."""
    return judge(
        version >= OLDEST_PYTHON,
        "versions.python",
        f"{'.'.join(map(str, version))}, {sys.executable}",
        "install Python 3.10 or newer",
        Status.ERROR,
    )


def package_findings(
    versions: Mapping[str, str | None],
    required: tuple[str, ...],
    requirements: Mapping[str, Requirement] | None = None,
) -> Iterator[Finding]:
    """Yield a finding per package: a warning for a version out of range, else `ok`.

    For a package that is not installed: an error if it is required, else nothing.
    versions:     package -> version, None = not installed
    required:     packages that must be installed
    requirements: package -> range; None = those of this package's metadata
    """
    ranges = _requirements() if requirements is None else requirements
    for name, version in versions.items():
        check, wanted = f"versions.{name}", ranges.get(name)
        if version is None:
            if name in required:
                remedy = f"pip install '{wanted or name}' (tested sets: constraints/)"
                yield error(check, "not installed", remedy)
        elif wanted is not None and not wanted.specifier.contains(version, prereleases=True):
            value = f"{version}, outside of {wanted.specifier}"
            yield warning(check, value, f"pip install '{wanted}'")
        else:
            yield ok(check, version)


def npu_findings() -> Iterator[Finding]:
    """Yield findings on CANN, imported source folders and combinations of versions on this host.

    Each problem of a combination is an error if it is fatal, else a warning; a combination
    without a problem yields nothing.
    """
    versions = npu_versions.read_versions()
    yield _cann_finding(versions.cann)
    yield from _source_findings()
    for problem in (*npu_versions.source_problems(), *npu_versions.pair_problems(versions)):
        status = Status.ERROR if problem.fatal else Status.WARNING
        yield Finding("versions.pairs", status, problem.rule, problem.remedy)


def _cann_finding(cann: str | None) -> Finding:
    """Return `ok` with the version of CANN; an error for None, which means not installed."""
    if cann is None:
        return error(
            "versions.cann",
            "no CANN found",
            "install CANN, and source its set_env.sh before `ray start` and the run",
        )
    return ok("versions.cann", cann)


def _source_findings() -> list[Finding]:
    """Return one `ok` finding with the folders that Megatron and MindSpeed would be imported from.

    Packages that are not found are left out; [] if none is found.
    """
    modules = ("megatron.core", "megatron.training", "mindspeed")
    folders = {module: packages.folder_of(module) for module in modules}
    there = [f"{module} from {folder}" for module, folder in folders.items() if folder]
    return [ok("versions.sources", ", ".join(there))] if there else []


def _requirements() -> dict[str, Requirement]:
    """Map each dependency of this package that applies here to its requirement.

    Returns {} if this package is not installed.
    """
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return {}
    parsed = map(Requirement, lines)
    return {each.name: each for each in parsed if each.marker is None or each.marker.evaluate()}
