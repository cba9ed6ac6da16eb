"""`constraints/SHA256SUMS`, and the requirements that `make install` gives to pip from it."""

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "constraints"
SETS = sorted(FOLDER.glob("*.txt"))
A, B = "a" * 64, "b" * 64


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("locked")


@pytest.fixture
def update(locked: ModuleType) -> ModuleType:
    return importlib.import_module("update_hashes")


def named(locked: ModuleType) -> set[Any]:
    """The lines of all sets, but torch."""
    pins = {pin for file in SETS for pin in locked.pins(file.read_text(encoding="utf-8"))}
    return {pin for pin in pins if pin.name != "torch"}


def test_every_package_has_a_file_for_every_python_and_machine(update: ModuleType) -> None:
    locked = importlib.import_module("locked")
    files = locked.sums(locked.SUMS.read_text(encoding="utf-8"))
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in files.values())
    without = []
    files_of: dict[tuple[str, str], list[str]] = {}
    for name in files:
        files_of.setdefault(locked.package(name), []).append(name)
    for pin in named(locked):
        own = files_of.get((pin.name, pin.version), [])
        targets = list(update.targets(pin))
        assert targets, pin.line
        without += [(pin.line, *target) for target in targets if not update.usable(own, *target)]
    assert without == [], "run python constraints/update_hashes.py"


def test_no_file_is_of_a_version_that_is_no_longer_named(locked: ModuleType) -> None:
    files = locked.sums(locked.SUMS.read_text(encoding="utf-8"))
    assert {locked.package(file) for file in files} == {
        (pin.name, pin.version) for pin in named(locked)
    }, "run python constraints/update_hashes.py"


def test_a_line_has_the_hash_of_every_file_of_its_version(locked: ModuleType) -> None:
    files = {"a_b-1-cp311-x.whl": A, "a_b-1-cp312-x.whl": B, "a_b-2-cp311-x.whl": "c" * 64}
    (line,) = locked.hashed(locked.pins('# x\n\nA.b==1; python_version < "3.13"\n'), files)
    assert line.replace("\\\n   ", "") == (
        f'A.b==1; python_version < "3.13"  --hash=sha256:{A}  --hash=sha256:{B}'
    )


def test_a_package_without_a_hash_is_an_error(locked: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"no file of a 2; run .*update_hashes\.py"):
        locked.hashed(locked.pins("a==2"), {"a-1-py3-none-any.whl": A})


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_make_installs_with_hashes_all_but_torch_and_this_package(
    device: str, tmp_path: Path
) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make")
    for part in ("Makefile", "constraints"):
        (tmp_path / part).symlink_to(ROOT / part)
    for name in ("setup.py", "pyproject.toml"):
        (tmp_path / name).touch()

    def commands(*options: str) -> list[str]:
        command = ["make", "--dry-run", "install", f"DEVICE={device}", *options]
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        text = subprocess.check_output(
            command, text=True, timeout=60, cwd=tmp_path, env=environment
        )
        return [line for line in text.splitlines() if " -m pip " in line and " install " in line]

    apart = [line for line in commands() if "--require-hashes" not in line]
    assert [line.split()[-1].partition("==")[0] for line in apart] == (
        [".", "torch"] if device == "cpu" else ["."]
    )
    assert "--no-deps --no-build-isolation" in apart[0]
    assert len(commands()) == len(apart) + 2
    assert all("--no-index" in line for line in commands("WHEELHOUSE=folder"))
    assert not [line for line in commands("HASHES=no") if "--require-hashes" in line]
