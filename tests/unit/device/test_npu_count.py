"""Devices are counted, and their memory is read, without claiming one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import driver, npu
from mindspeed_rlxf.ops.doctor import checks
from tests.unit.device import npu_recorder

CPU, CUDA, NPU = DeviceKind.CPU, DeviceKind.CUDA, DeviceKind.NPU


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
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Host]:
    """CANN and torch_npu are installed; importing torch_npu fails the test."""
    npu_recorder.install(monkeypatch, tmp_path)
    (tmp_path / "bin").mkdir()
    yield Host(tmp_path / "bin", monkeypatch)
    assert "torch_npu" not in sys.modules


@pytest.mark.parametrize(
    ("shown", "count"), [(None, 4), ("", 4), ("2,3", 2), (" 1 , 2,3", 3), ("0,1,2,3,4,5", 4)]
)
def test_the_drivers_tool_counts_visible_devices(host, monkeypatch, shown, count):
    host.smi(4)
    if shown is not None:
        monkeypatch.setenv(npu.VISIBLE, shown)
    assert device.device_count(NPU) == count


@pytest.mark.parametrize("tool", [None, "echo a new table", "echo dcmi is not there >&2; exit 8"])
def test_where_the_tool_fails_torch_npu_counts_in_a_separate_process(host, tool):
    if tool is not None:
        host.program("npu-smi", tool)
    host.program("python", f"echo a warning; echo '{npu.ANSWER}3'")
    assert device.device_count(NPU) == 3


def test_where_both_counts_fail_the_error_names_both_reasons_and_a_remedy(host, monkeypatch):
    host.program("python", "echo Traceback >&2; echo 'ImportError: libhccl.so' >&2; exit 1")
    rule = r"must be counted.*npu-smi is not on PATH, and .*ended with 1.*libhccl\.so; put npu-smi"
    with pytest.raises(ValueError, match=rule):
        device.device_count(NPU)
    monkeypatch.setattr(npu, "IMPORT_S", 0.05)
    host.program("python", "exec sleep 5")
    with pytest.raises(ValueError, match=r"no answer within 0\.05 s"):
        device.device_count(NPU)


def test_the_separate_process_prints_the_count_of_torch_npu(host, monkeypatch, tmp_path):
    """The true program, with a torch_npu and a torch that are one line each."""
    for name, text in {"torch": "", "torch_npu": "class npu: device_count = lambda: 6"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", os.path.realpath(f"/proc/{os.getpid()}/exe"))
    assert npu.count_by_torch() == 6


def test_the_doctor_compares_the_counts_of_torch_and_of_the_driver(host):
    host.smi(4)
    host.program("python", f"echo '{npu.ANSWER}3'")
    found = [f for f in checks.check_devices(NPU) if f.check == "devices.torch"]
    assert [(f.status.value, f.value) for f in found] == [
        ("error", "torch sees 3, the driver offers 4")
    ]


MIB = 1024**2
GPUS = "0, H100, 81559, 4, 550.54\n1, A100, 40960, 4, 550.54\n"
CHIPS = npu_recorder.smi_table(2).replace("65536", "32768", 1)


@pytest.mark.parametrize(("kind", "output", "size"), [
    (CUDA, GPUS, 40960 * MIB), (NPU, CHIPS, 32768 * MIB), (CUDA, "[N/A]\n", None),
    (NPU, "[N/A]\n", None), (CUDA, None, None), (NPU, None, None), (CPU, CHIPS, None),
])  # fmt: skip
def test_the_smallest_device_counts_where_the_tool_answers(monkeypatch, kind, output, size):
    """output: None = there is no tool"""
    done = SimpleNamespace(returncode=0, stdout=output, stderr="")
    monkeypatch.setattr(shutil, "which", lambda tool: tool if output else None)
    monkeypatch.setattr(driver, "run_within", lambda command, limit_s: done)
    assert device.smallest_device_memory(kind) == size


def test_a_tool_that_cannot_be_killed_is_not_waited_for(monkeypatch):
    """npu-smi waits for a driver that hangs, in a state in which no signal ends it."""
    kept: list[subprocess.Popen[str]] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: kept.append(process))
    monkeypatch.setattr(driver, "KILL_S", 0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        driver.run_within(["sleep", "60"], 0.1)
    monkeypatch.undo()
    (process,) = kept
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=30)
