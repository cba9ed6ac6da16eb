"""Memory of a device as its tool tells it."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind

MIB = 1024**2


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    result = subprocess.CompletedProcess([], 0, stdout=text)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: result)


def test_smallest_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "81559\n40960\n")
    assert device.memory_unclaimed(DeviceKind.CUDA) == 40960 * MIB


def test_an_answer_without_numbers_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "[N/A]\n")
    assert device.memory_unclaimed(DeviceKind.CUDA) is None


def test_no_tool_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_args: Any, **_kwargs: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", run)
    assert device.memory_unclaimed(DeviceKind.CUDA) is None


@pytest.mark.parametrize("kind", [DeviceKind.CPU, DeviceKind.NPU])
def test_others_are_not_asked(kind: DeviceKind) -> None:
    assert device.memory_unclaimed(kind) is None
