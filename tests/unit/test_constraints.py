"""The files that `make STACK=...` installs from."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from mindspeed_rlxf.device.npu_versions import SETS, VersionSet

FILES = sorted((Path(__file__).parents[2] / "constraints").glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_line_is_a_comment_or_an_exact_version(file: Path) -> None:
    pins: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), line
            pins.append(f"{requirement.name} {requirement.marker or ''}")
    assert len(set(pins)) == len(pins), "a package is named twice"
    assert "torch " in pins, "make takes the torch from here"


def ranges(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `setup.py` tells setuptools, which need not be there."""
    told: dict[str, Any] = {}
    stand_in = SimpleNamespace(setup=told.update, find_packages=lambda **_: [])
    monkeypatch.setitem(sys.modules, "setuptools", stand_in)
    runpy.run_path(str(FILES[0].parents[1] / "setup.py"))
    return told


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_tested_versions_are_within_the_ranges_that_are_installed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ranges(monkeypatch)
    wanted = {r.name: r.specifier for r in map(Requirement, told["install_requires"])}
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert wanted.keys() <= {pin.name for pin in pins}
    for pin in pins:
        (version,) = (specifier.version for specifier in pin.specifier)
        assert pin.name not in wanted or version in wanted[pin.name], pin


def test_python_and_torch_have_no_newest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ranges(monkeypatch)
    torch = next(r for r in told["install_requires"] if Requirement(r).name == "torch")
    for specifier in (told["python_requires"], torch.removeprefix("torch")):
        assert re.fullmatch(r">=[\d.]+", specifier), specifier


def test_torch_is_at_least_the_release_whose_restricted_unpickler_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CVE-2025-32434: before 2.6 torch's own `weights_only` could be made to run code."""
    told = ranges(monkeypatch)
    torch = next(r for r in map(Requirement, told["install_requires"]) if r.name == "torch")
    (npu,) = map(Requirement, told["extras_require"]["npu"])
    for requirement in (torch, npu):
        assert "2.5.1" not in requirement.specifier and "2.6.0" in requirement.specifier
    for each in SETS:
        assert all(version in torch.specifier for version in each.torch), each.name


@pytest.mark.parametrize("each", SETS, ids=lambda each: each.name)
def test_checkouts_are_installed_by_commit(each: VersionSet) -> None:
    """The table and, for the default set, the commands of docs/npu.md have those of the code."""
    text = (FILES[0].parents[1] / "docs" / "npu.md").read_text(encoding="utf-8")
    commits = each.megatron_commit, each.mindspeed_commit
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in commits)
    assert f"| `{each.name}` | `{commits[0]}` | `{commits[1]}` |" in text
    if each is SETS[0]:
        assert f"git -C Megatron-LM checkout {commits[0]}" in text
        assert f"git -C MindSpeed checkout {commits[1]}" in text
