"""Python packages, checkouts and commands of an NPU host are checked, with their remedies."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_rlxf import packages
from mindspeed_rlxf.device import npu_python, npu_sets
from mindspeed_rlxf.device.npu_install import Checked
from mindspeed_rlxf.device.npu_versions import Installed
from tests.unit.device import npu_recorder

THERE = Installed("2.7.1+cpu", "2.7.1.post8", "0.12.1", "0.12.1", "9.1.0")
CONSTRAINTS = Path(__file__).parents[3] / "constraints"
VERSIONS = {
    "numpy": "2.4.6", "decorator": "5.2.1", "sympy": "1.14.0", "cffi": "2.0.0", "attrs": "26.1.0",
    "cython": "3.2.0", "pyyaml": "6.0.3", "pathlib2": "2.3.7", "protobuf": "7.36.2",
    "scipy": "1.17.1", "requests": "2.34.2", "psutil": "7.2.2", "absl-py": "2.3.1",
    "transformers": "4.51.3",
}  # fmt: skip


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An x86 host with the default set: checkouts on the path, commands of this environment."""
    npu_recorder.install(monkeypatch, tmp_path)
    (tmp_path / "MindSpeed" / "setup.py").write_text("__version__ = '0.12.1'\n")
    npu_recorder.checkout(tmp_path / "wheel", ["core"], (0, 12, 1))
    folders = [tmp_path / name for name in ("Megatron-LM", "MindSpeed", "wheel")]
    npu_recorder.look_in(monkeypatch, folders)
    monkeypatch.setattr(packages, "_installed", VERSIONS.get)
    monkeypatch.setattr(npu_python.platform, "machine", lambda: "x86_64")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("python", *npu_python.COMMANDS):
        (bin_ / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(bin_ / "python"))
    monkeypatch.setenv("PATH", str(bin_))
    return tmp_path


def bad(versions: Installed = THERE) -> dict[str, Checked]:
    return {each.name: each for each in npu_python.check_python(versions) if not each.fine}


def test_the_default_set_has_no_findings(host: Path) -> None:
    """The wheel of the set's version beside the checkout is one of them."""
    assert bad() == {}


def test_a_python_of_no_set_is_a_warning(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    found = bad()["npu.python"]
    assert not found.fatal and found.remedy == "make the environment with Python 3.11"


@pytest.mark.parametrize("torch", ["2.7.1", "2.7.1+cu128"])
def test_on_x86_the_cpu_build_of_torch_is_asked_for_with_its_index(host: Path, torch: str) -> None:
    ((name, found),) = bad(replace(THERE, torch=torch)).items()
    wanted = "pip install torch==2.7.1+cpu --index-url https://download.pytorch.org/whl/cpu"
    assert (name, found.remedy) == ("npu.torch_build", wanted)


def test_on_arm_the_plain_torch_is_that_of_the_index(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npu_python.platform, "machine", lambda: "aarch64")
    assert bad() == bad(replace(THERE, torch="2.7.1")) == {}


def test_a_package_that_cann_imports_is_an_error_with_the_command(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {**VERSIONS, "decorator": None, "absl-py": None}
    monkeypatch.setattr(packages, "_installed", there.get)
    found = bad()["npu.cann_packages"]
    assert found.fatal and found.remedy == "pip install decorator absl-py"


@pytest.mark.parametrize(
    ("cann", "wrong"),
    [
        ("8.3.RC1", ["numpy 2.4.6, not <=1.24.0", "protobuf 7.36.2, not ==3.20.*"]),
        ("8.5.0", ["numpy 2.4.6, not <2", "protobuf 7.36.2, not ==3.20.*"]),
        ("9.0.0", ["protobuf 7.36.2, not ==3.20.*"]),
        ("9.1.0", []),
        ("9.2.0", []),
    ],
)
def test_versions_that_a_cann_does_not_take_are_named(
    host: Path, cann: str, wrong: list[str]
) -> None:
    found = bad(replace(THERE, cann=cann)).get("npu.cann_ranges")
    assert (found.value.partition(": ")[2].split("; ") if found else []) == wrong


def test_packages_in_versions_never_tried_are_named(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_installed", {**VERSIONS, "transformers": "6.0.0"}.get)
    found = bad()["npu.tested"]
    assert "transformers 6.0.0" in found.value and "4.51.3, 5.20.2, 5.23.0" in found.remedy


def test_every_tested_version_is_in_a_set_or_in_the_guide() -> None:
    texts = [file.read_text(encoding="utf-8") for file in CONSTRAINTS.glob("*.txt")]
    guide = (CONSTRAINTS.parent / "docs" / "npu.md").read_text(encoding="utf-8")
    for name, versions in npu_sets.TESTED.items():
        pinned = {v for text in texts for v in re.findall(rf"^{name}==([\d.]+)", text, re.M)}
        assert pinned <= set(versions), f"{name}: a set has a version that is not listed"
        for version in set(versions) - pinned:
            assert re.search(rf"{name} {re.escape(version)}", guide), f"{name} {version}"


def test_a_second_megatron_of_another_version_is_named_with_its_folder(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image that carries its own."""
    npu_recorder.checkout(host / "image", ["core", "training"], (0, 16, 1))
    monkeypatch.setattr(sys, "path", [*sys.path, str(host / "image")])
    found = bad()["npu.copies"]
    first, *_ = found.value.split("; ")
    assert first == f"megatron.core 0.12.1 in {host}/Megatron-LM"
    assert f"megatron.core 0.16.1 in {host}/image" in found.value


def test_transformer_engine_is_a_warning(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host / "wheel" / "transformer_engine").mkdir()
    (host / "wheel" / "transformer_engine" / "__init__.py").touch()
    assert "pip uninstall transformer_engine" in bad()["npu.transformer_engine"].remedy


@pytest.mark.parametrize(
    ("ascend", "stock", "remedy"),
    [
        (None, None, "pip install triton-ascend==3.2.1 --extra-index-url="),
        ("3.2.0", "3.5.0", "pip uninstall -y triton triton-ascend; pip install"),
        ("3.2.0", None, ""),
        ("3.2.1", "3.5.0", ""),
    ],
)
def test_core_0_16_needs_triton_ascend_and_says_how(
    host: Path,
    monkeypatch: pytest.MonkeyPatch,
    ascend: str | None,
    stock: str | None,
    remedy: str,
) -> None:
    there = {**VERSIONS, "triton-ascend": ascend, "triton": stock}
    monkeypatch.setattr(packages, "_installed", there.get)
    found = bad(Installed("2.7.1+cpu", "2.7.1.post4", "0.16.1", "0.16.0", "9.1.0"))
    assert ("npu.triton" in found) is bool(remedy)
    if remedy:
        assert found["npu.triton"].fatal and found["npu.triton"].remedy.startswith(remedy)
    assert "npu.triton" not in bad()  # core 0.12.1 imports none


def test_commands_of_another_environment_are_named_with_the_path(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = host / "other"
    other.mkdir()
    (other / "ray").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{other}:{host / 'bin'}")
    found = bad()["npu.commands"]
    assert found.value == f"ray: {other / 'ray'}"
    assert found.remedy.startswith(f"export PATH={host / 'bin'}:$PATH")
