"""The doctor on NPU: the checks of the guide, and the rules by which a worker refuses to start."""

import re
import sys
from pathlib import Path

import pytest

from mindspeed_rlxf.config import packages
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import npu_versions
from mindspeed_rlxf.ops.doctor import checks
from tests.unit.device import npu_recorder
from tests.unit.device.test_npu_host import VERSIONS, make_host

GUIDE = Path(__file__).parents[4] / "docs" / "npu.md"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with the set of core 0.12.1, Megatron-LM and MindSpeed as checkouts on the path."""
    npu_recorder.install(monkeypatch, tmp_path)
    (tmp_path / "MindSpeed" / "setup.py").write_text("__version__ = '0.12.1'\n")
    return tmp_path


def check_out(host: Path, numbers: tuple[int, int, int]) -> None:
    lines = [f"{n} = {v}\n" for n, v in zip(packages.NUMBERS, numbers, strict=True)]
    file = host / "Megatron-LM" / "megatron" / "core" / "package_info.py"
    file.write_text("".join(lines))


def findings_of(check: str) -> list[tuple[str, str, str]]:
    found = checks.check_software(DeviceKind.NPU)
    return [(f.status.value, f.value, f.remedy) for f in found if f.check == check]


def test_versions_and_folders_of_checkouts_are_reported(host):
    assert findings_of("versions.megatron-core") == [("ok", "0.12.1", "")]
    assert findings_of("versions.mindspeed") == [("ok", "0.12.1", "")]
    ((status, value, _),) = findings_of("versions.sources")
    assert status == "ok" and f"megatron.core from {host}/Megatron-LM/megatron/core" in value
    assert findings_of("versions.pairs") == []
    assert not [name for name in sys.modules if name.startswith(("megatron.", "mindspeed."))]


def test_mindspeed_and_another_megatron_are_an_error_with_its_remedy(host):
    check_out(host, (0, 16, 1))
    what = "MindSpeed 0.12.1 must pair with Megatron-LM 0.16.1"
    assert findings_of("versions.pairs") == [("error", what, "check out MindSpeed core_r0.16.0")]
    with pytest.raises(ValueError, match=what):
        npu_versions.require_versions()  # as a worker does


def test_the_version_of_cann_is_read_from_the_folder_of_set_env(tmp_path, monkeypatch):
    folder = tmp_path / "aarch64-linux"
    folder.mkdir()
    file = folder / "ascend_toolkit_install.info"
    file.write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\n", encoding="ascii")
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    assert npu_versions.cann_version() == "8.5.0"
    file.unlink()
    text = "# version: 1.0\nruntime_running_version=[8.1.RC1]\n"
    (tmp_path / "version.cfg").write_text(text, encoding="ascii")
    assert npu_versions.cann_version() == "8.1.RC1"


def test_every_check_of_the_guide_is_made(monkeypatch, tmp_path):
    npu_recorder.install(monkeypatch, tmp_path / "sources")
    monkeypatch.setattr(packages, "_installed", VERSIONS.get)
    inspected = make_host(tmp_path)
    monkeypatch.setattr(npu_versions, "Host", lambda: inspected)
    subject = checks.Subject(DeviceKind.NPU, str(tmp_path))
    checked = {finding.check for finding in checks.check_host(subject)}
    found = {check for check in checked if check.startswith("npu.")}
    steps = GUIDE.read_text(encoding="utf-8").partition("\n### Not tried")[0]
    asked = set(re.findall(r"`(npu\.[a-z_]+)`", steps))
    assert asked - found == {"npu.triton", "npu.transformer_engine"}  # where there is a reason
    assert found <= asked
