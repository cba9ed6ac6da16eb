"""Devices of an NPU host are counted without torch_npu in this process."""

import os
import sys
from pathlib import Path

import pytest

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import npu
from mindspeed_rlxf.ops.doctor import checks
from tests.unit.device import npu_recorder

NPU = DeviceKind.NPU


class Host:
    """Programs in place of npu-smi and of the Python that asks torch_npu."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.setattr(sys, "executable", str(folder / "python"))
        self.program("python", "echo asked; exit 1")

    def program(self, name: str, script: str) -> None:
        file = self._folder / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def smi(self, count: int) -> None:
        self.program("npu-smi", f"cat <<'TABLE'\n{npu_recorder.smi_table(count)}TABLE")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    """CANN and torch_npu are installed; importing torch_npu fails the test."""
    npu_recorder.install(monkeypatch, tmp_path)
    (tmp_path / "bin").mkdir()
    return Host(tmp_path / "bin", monkeypatch)


@pytest.fixture(autouse=True)
def stays_out(host: Host) -> object:
    yield
    assert "torch_npu" not in sys.modules


@pytest.mark.parametrize(
    ("shown", "count"), [(None, 4), ("", 4), ("2,3", 2), (" 1 , 2,3", 3), ("0,1,2,3,4,5", 4)]
)
def test_the_drivers_tool_counts_devices_that_the_variable_does_not_hide(
    host: Host, monkeypatch: pytest.MonkeyPatch, shown: str | None, count: int
) -> None:
    host.smi(4)
    if shown is not None:
        monkeypatch.setenv(npu.VISIBLE, shown)
    assert device.device_count(NPU) == count


@pytest.mark.parametrize("tool", [None, "echo a new table", "echo dcmi is not there >&2; exit 8"])
def test_where_the_tool_fails_torch_npu_counts_in_a_separate_process(
    host: Host, tool: str | None
) -> None:
    if tool is not None:
        host.program("npu-smi", tool)
    host.program("python", f"echo a warning; echo '{npu.ANSWER}3'")
    assert device.device_count(NPU) == 3


def test_where_both_counts_fail_the_error_names_both_reasons_and_a_remedy(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.program("python", "echo Traceback >&2; echo 'ImportError: libhccl.so' >&2; exit 1")
    rule = r"must be counted.*npu-smi is not on PATH, and .*ended with 1.*libhccl\.so; put npu-smi"
    with pytest.raises(ValueError, match=rule):
        device.device_count(NPU)
    monkeypatch.setattr(npu, "IMPORT_S", 0.05)
    host.program("python", "exec sleep 5")
    with pytest.raises(ValueError, match=r"no answer within 0\.05 s"):
        device.device_count(NPU)


def test_the_separate_process_prints_the_count_of_torch_npu(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The true program, with a torch_npu and a torch that are one line each."""
    for name, text in {"torch": "", "torch_npu": "class npu: device_count = lambda: 6"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", os.path.realpath(f"/proc/{os.getpid()}/exe"))
    assert npu.count_by_torch() == 6


def test_the_doctor_compares_the_counts_of_torch_and_of_the_driver(host: Host) -> None:
    host.smi(4)
    host.program("python", f"echo '{npu.ANSWER}3'")
    found = [f for f in checks.check_devices(NPU) if f.check == "devices.torch"]
    assert [(f.status.value, f.value) for f in found] == [
        ("error", "torch sees 3, the driver offers 4")
    ]
