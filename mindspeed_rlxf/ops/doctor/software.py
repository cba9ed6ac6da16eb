"""Versions of what is installed, and whether they go together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

from mindspeed_rlxf import device, packages
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import npu_versions, version_sets
from mindspeed_rlxf.ops.doctor.findings import Finding, error, ok, warning
from mindspeed_rlxf.ops.doctor.host import python_finding

DISTRIBUTION = "mindspeed-rlxf"


def look(kind: DeviceKind) -> list[Finding]:
    """Python, every package that matters, CANN, and the pairs among them."""
    kind = device.resolve_kind(kind)
    versions = version_sets.installed()
    found = [python_finding(), *package_findings(versions, version_sets.REQUIRED[kind])]
    return found + (npu_findings() if kind is DeviceKind.NPU else [])


def package_findings(
    versions: Mapping[str, str | None],
    required: tuple[str, ...],
    requirements: Mapping[str, Requirement] | None = None,
) -> list[Finding]:
    """One finding each; packages that are neither needed nor there are left out."""
    ranges = _requirements() if requirements is None else requirements
    found = []
    for name, version in versions.items():
        check, wanted = f"versions.{name}", ranges.get(name)
        if version is None:
            if name in required:
                remedy = f"pip install '{wanted or name}' (tested sets: constraints/)"
                found.append(error(check, "not installed", remedy))
        elif wanted is not None and not wanted.specifier.contains(version, prereleases=True):
            value = f"{version}, outside of {wanted.specifier}"
            found.append(warning(check, value, f"pip install '{wanted}'"))
        else:
            found.append(ok(check, version))
    return found


def npu_findings() -> list[Finding]:
    """What a worker would refuse, or warn of, when it starts: by the same rules."""
    there = npu_versions.found()
    found = [_cann(there.cann), *_sources()]
    for problem in (*npu_versions.source_problems(), *npu_versions.pair_problems(there)):
        say = error if problem.fatal else warning
        found.append(say("versions.pairs", problem.what, problem.remedy))
    return found


def _cann(cann: str | None) -> Finding:
    if cann is None:
        remedy = "install CANN, and source its set_env.sh before `ray start` and the run"
        return error("versions.cann", "no CANN found", remedy)
    if not (os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")):
        remedy = "source its set_env.sh before `ray start` and the run"
        return warning("versions.cann", f"{cann}, its set_env.sh is not sourced", remedy)
    return ok("versions.cann", cann)


def _sources() -> list[Finding]:
    """Where checkouts are imported from: what a version alone does not tell."""
    modules = ("megatron.core", "megatron.training", "mindspeed")
    folders = {module: packages.folder_of(module) for module in modules}
    there = [f"{module} from {folder}" for module, folder in folders.items() if folder]
    return [ok("versions.sources", ", ".join(there))] if there else []


def _requirements() -> dict[str, Requirement]:
    """Of this package, by name; empty where it is on the path without being installed."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return {}
    parsed = map(Requirement, lines)
    return {each.name: each for each in parsed if each.marker is None or each.marker.evaluate()}
