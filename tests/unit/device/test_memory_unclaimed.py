"""Memory of a device as the driver's tool tells it."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind

MIB = 1024**2
# As `npu-smi info` prints it: two rows a chip, device memory last.
ASCEND = """
| npu-smi 24.1.0                   Version: 24.1.0                                             |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.1        37                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3402 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 90.5        36                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3390 / 32768         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
"""


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> list[str]:
    """The tool is there and says this; the list is of the tools that were asked."""
    asked: list[str] = []

    def run(command: Any, **_kwargs: Any) -> Any:
        asked.append(command[0])
        return subprocess.CompletedProcess([], 0, stdout=text, stderr="")

    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_smallest_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "0, H100, 81559, 4, 550.54\n1, A100, 40960, 4, 550.54\n")
    assert device.memory_unclaimed(DeviceKind.CUDA) == 40960 * MIB


def test_smallest_npu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, ASCEND)
    assert device.memory_unclaimed(DeviceKind.NPU) == 32768 * MIB
    assert asked == ["npu-smi"]


@pytest.mark.parametrize("kind", [DeviceKind.CUDA, DeviceKind.NPU])
def test_an_answer_without_numbers_is_unknown(
    monkeypatch: pytest.MonkeyPatch, kind: DeviceKind
) -> None:
    answer(monkeypatch, "[N/A]\n")
    assert device.memory_unclaimed(kind) is None


@pytest.mark.parametrize("kind", [DeviceKind.CUDA, DeviceKind.NPU])
def test_no_tool_is_unknown(monkeypatch: pytest.MonkeyPatch, kind: DeviceKind) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert device.memory_unclaimed(kind) is None


def test_a_cpu_has_no_tool_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, ASCEND)
    assert device.memory_unclaimed(DeviceKind.CPU) is None and asked == []
