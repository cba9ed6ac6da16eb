"""Memory of a device as the tool of its driver reports it."""

import shutil
import subprocess
from types import SimpleNamespace

import pytest

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import driver
from tests.unit.device.npu_recorder import smi_table

CPU, CUDA, NPU = DeviceKind.CPU, DeviceKind.CUDA, DeviceKind.NPU
MIB = 1024**2
GPUS = "0, H100, 81559, 4, 550.54\n1, A100, 40960, 4, 550.54\n"
CHIPS = smi_table(2).replace("65536", "32768", 1)


@pytest.mark.parametrize(
    ("kind", "output", "size"),
    [
        (CUDA, GPUS, 40960 * MIB),
        (NPU, CHIPS, 32768 * MIB),
        (CUDA, "[N/A]\n", None),
        (NPU, "[N/A]\n", None),
        (CUDA, None, None),
        (NPU, None, None),
        (CPU, CHIPS, None),
    ],
)
def test_the_smallest_device_counts_where_the_tool_answers(
    monkeypatch: pytest.MonkeyPatch, kind: DeviceKind, output: str | None, size: int | None
) -> None:
    """output: None = there is no tool"""
    done = SimpleNamespace(returncode=0, stdout=output, stderr="")
    monkeypatch.setattr(shutil, "which", lambda tool: tool if output else None)
    monkeypatch.setattr(driver, "run_within", lambda command, limit_s: done)
    assert device.smallest_device_memory(kind) == size


def test_a_tool_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
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
