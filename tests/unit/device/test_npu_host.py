"""The checks of an installation on an NPU host find each fault and name its remedy.

A folder with the files that the vendor's guides name stands in for `/`.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

from mindspeed_rlxf.config import packages
from mindspeed_rlxf.device import npu_versions
from mindspeed_rlxf.device.findings import Finding, Status
from mindspeed_rlxf.device.npu_versions import Host, Installed
from tests.unit.device import npu_recorder

THERE = Installed("2.7.1+cpu", "2.7.1.post8", "0.12.1", "0.12.1", "9.1.0")
VERSIONS: dict[str, str | None] = {
    "numpy": "2.4.6", "decorator": "5.2.1", "sympy": "1.14.0", "cffi": "2.0.0", "attrs": "26.1.0",
    "cython": "3.2.0", "pyyaml": "6.0.3", "pathlib2": "2.3.7", "protobuf": "7.36.2",
    "scipy": "1.17.1", "requests": "2.34.2", "psutil": "7.2.2", "absl-py": "2.3.1",
}  # fmt: skip


def make_host(root: Path, **changed: str) -> Host:
    """A host on which every line is fine. changed: variables of the environment"""
    cann, atb = root / "cann", root / "atb"
    for name in (*npu_versions.DEVICE_FILES, "/dev/davinci0", "/dev/davinci1"):
        touch(root / name.lstrip("/"))
    touch(root / npu_versions.DRIVER_VERSION.lstrip("/")).write_text("Version=25.5.1\n")
    touch(root / npu_versions.SET_ENV[0].lstrip("/"))
    (cann / "opp" / npu_versions.KERNELS / "ascend910b").mkdir(parents=True)
    (cann / "python" / "site-packages").mkdir(parents=True)
    atb.mkdir()
    environment = {
        "PYTHONPATH": str(cann / "python" / "site-packages"),
        "ASCEND_HOME_PATH": str(cann),
        "ATB_HOME_PATH": str(atb),
    }
    return Host(root, {**environment, **changed})


def touch(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


def bad(found: Iterable[Finding]) -> dict[str, Finding]:
    return {each.check: each for each in found if each.status is not Status.OK}


def everything(host: Host) -> dict[str, Finding]:
    return bad([*npu_versions.check_driver(host), *npu_versions.check_cann(host)])


def test_a_whole_installation_has_no_findings(tmp_path):
    assert everything(make_host(tmp_path)) == {}
    both = make_host(tmp_path / "b", ASCEND_TOOLKIT_HOME=str(tmp_path / "b" / "cann"))
    assert everything(both) == {}


@pytest.mark.parametrize(("gone", "variables", "check", "value", "remedy"), [
    ([npu_versions.DRIVER_VERSION], {}, "driver", npu_versions.DRIVER_VERSION, "the firmware"),
    (["/dev/hisi_hdc"], {}, "device_files", "/dev/hisi_hdc", "--device /dev/hisi_hdc"),
    (["/dev/davinci0", "/dev/davinci1"], {}, "device_files", "/dev/davinci<N>", ""),
    ([], {"PYTHONPATH": "/somewhere/Megatron-LM"}, "cann_python", "", "keep $PYTHONPATH"),
    ([], {"ATB_HOME_PATH": ""}, "atb", "", "install CANN's NNAL first"),
    ([], {"ASCEND_OPP_PATH": "/nowhere"}, "operators", "", "Ascend-cann-A3-ops"),
    ([], {"ASCEND_TOOLKIT_HOME": "/older"}, "set_env", "/older", ""),
])  # fmt: skip
def test_a_fault_is_named_with_its_remedy(tmp_path, gone, variables, check, value, remedy):
    host = make_host(tmp_path, **variables)
    for name in gone:
        host.path(name).unlink()
    ((name, found),) = everything(host).items()
    trains = check in ("atb", "operators")
    assert (name, found.status) == (f"npu.{check}", Status.WARNING if trains else Status.ERROR)
    assert value in found.value and remedy in found.remedy


@pytest.mark.parametrize("script", [*npu_versions.SET_ENV, "/home/me/Ascend/cann/set_env.sh"])
def test_the_remedy_names_the_set_env_that_is_there(tmp_path, script):
    """CANN 8.5 and later have it in `cann`, older ones in `ascend-toolkit`."""
    host = make_host(tmp_path, ASCEND_HOME_PATH="", HOME="/home/me")
    host.path(npu_versions.SET_ENV[0]).unlink()
    touch(host.path(script))
    ((name, found),) = bad(npu_versions.check_cann(host)).items()
    assert (name, found.status) == ("npu.set_env", Status.ERROR)
    assert f"source {script}" in found.remedy


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An x86 host with the default set, whose checkouts are on the path."""
    npu_recorder.install(monkeypatch, tmp_path)
    (tmp_path / "MindSpeed" / "setup.py").write_text("__version__ = '0.12.1'\n")
    monkeypatch.setattr(packages, "_installed", VERSIONS.get)
    monkeypatch.setattr(npu_versions.platform, "machine", lambda: "x86_64")
    return tmp_path


def bad_python(versions: Installed = THERE) -> dict[str, Finding]:
    return bad(npu_versions.check_python(versions))


def test_a_python_of_no_set_is_a_warning(host, monkeypatch):
    monkeypatch.setattr(npu_versions.platform, "python_version", lambda: "3.13.0")
    found = bad_python()["npu.python"]
    assert found.status is Status.WARNING
    assert found.remedy == "make the environment with Python 3.11"


def test_on_x86_the_cpu_build_of_torch_is_asked_for_and_on_arm_the_plain_one(host, monkeypatch):
    wanted = "pip install torch==2.7.1+cpu --index-url https://download.pytorch.org/whl/cpu"
    for torch in ("2.7.1", "2.7.1+cu128"):
        ((name, found),) = bad_python(THERE._replace(torch=torch)).items()
        assert (name, found.remedy) == ("npu.torch_build", wanted)
    assert bad_python() == {}
    monkeypatch.setattr(npu_versions.platform, "machine", lambda: "aarch64")
    assert bad_python() == bad_python(THERE._replace(torch="2.7.1")) == {}


def test_a_package_that_cann_imports_is_an_error_with_the_command(host, monkeypatch):
    there = {**VERSIONS, "decorator": None, "absl-py": None}
    monkeypatch.setattr(packages, "_installed", there.get)
    found = bad_python()["npu.cann_packages"]
    assert found.status is Status.ERROR and found.remedy == "pip install decorator absl-py"


@pytest.mark.parametrize(("cann", "wrong"), [
    ("8.3.RC1", ["numpy 2.4.6, not <=1.24.0", "protobuf 7.36.2, not ==3.20.*"]),
    ("8.5.0", ["numpy 2.4.6, not <2", "protobuf 7.36.2, not ==3.20.*"]),
    ("9.0.0", ["protobuf 7.36.2, not ==3.20.*"]), ("9.1.0", []), ("9.2.0", []),
])  # fmt: skip
def test_versions_that_a_cann_does_not_take_are_named(host, cann, wrong):
    found = bad_python(THERE._replace(cann=cann)).get("npu.cann_ranges")
    assert (found.value.partition(": ")[2].split("; ") if found else []) == wrong


def test_transformer_engine_is_a_warning(host):
    touch(host / "MindSpeed" / "transformer_engine" / "__init__.py")
    assert "pip uninstall transformer_engine" in bad_python()["npu.transformer_engine"].remedy


@pytest.mark.parametrize(("ascend", "stock", "remedy"), [
    (None, None, "pip install triton-ascend==3.2.1 --extra-index-url="),
    ("3.2.0", "3.5.0", "pip uninstall -y triton triton-ascend; pip install"), ("3.2.0", None, ""),
    ("3.2.1", "3.5.0", ""),
])  # fmt: skip
def test_core_0_16_needs_triton_ascend_and_says_how(host, monkeypatch, ascend, stock, remedy):
    there = {**VERSIONS, "triton-ascend": ascend, "triton": stock}
    monkeypatch.setattr(packages, "_installed", there.get)
    found = bad_python(Installed("2.7.1+cpu", "2.7.1.post4", "0.16.1", "0.16.0", "9.1.0"))
    assert ("npu.triton" in found) is bool(remedy)
    if remedy:
        assert found["npu.triton"].status is Status.ERROR
        assert found["npu.triton"].remedy.startswith(remedy)
    assert "npu.triton" not in bad_python()  # core 0.12.1 imports none
