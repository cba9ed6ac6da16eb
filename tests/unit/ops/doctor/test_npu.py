"""The doctor on an NPU host checks the lines of the guide, and on another device none of them."""

import re
from pathlib import Path

import pytest

from mindspeed_rlxf.config import packages
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.ops.doctor import checks
from mindspeed_rlxf.ops.doctor.checks import check_install
from tests.unit.device import npu_recorder
from tests.unit.device.test_npu_host import VERSIONS, make_host

GUIDE = Path(__file__).parents[4] / "docs" / "npu.md"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host of two devices, with the files and tools of a whole installation."""
    npu_recorder.install(monkeypatch, tmp_path / "sources")
    monkeypatch.setattr(packages, "_installed", VERSIONS.get)
    inspected = make_host(tmp_path)
    monkeypatch.setattr(checks, "Host", lambda: inspected)
    return tmp_path


def test_every_check_of_the_guide_is_made(host: Path) -> None:
    found = {finding.check for finding in check_install(DeviceKind.NPU)}
    steps = GUIDE.read_text(encoding="utf-8").partition("\n### Not tried")[0]
    asked = set(re.findall(r"`(npu\.[a-z_]+)`", steps))
    assert asked - found == {"npu.triton", "npu.transformer_engine"}  # where there is a reason
    assert found <= asked
